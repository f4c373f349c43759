"""What is refused because ignoring it would silently change the answer, and what is ignored aloud.

Three kinds of fields are not honoured here. Those that other servers know and that change an answer
are refused by name. Those that are a known field misspelt, or its name elsewhere, are refused with
the right name. All other unknown fields are ignored, as hints are and switches that nobody reads,
and named in a header of the answer.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.errors import RequestError
from router.http.apis.error_params import client_param
from router.http.openai.conversation import template_for
from router.http.openai.output_forms import FIELDS
from router.http.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from router.model import ServedModel
from runtime.config.templates import FIELD, SHIPPED

MAX_UNKNOWN = 64
MAX_NAME = 64
_ALIKE = 0.85
_CONSTRAINTS = ("structural_tag", "json_object", "grammar")
_NEUTRAL: Mapping[str, Sequence[object]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "chat_template": (),
    "documents": ([],),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "add_generation_prompt": (True,),
    "stop_regex": ([], ""),
    "no_stop_trim": (False,),
    "typical_p": (1,),
    "web_search_options": (),
    "audio": (),
    "moderation": (),
    "lora_path": (),
    "lora_request": (),
    "lora_name": (),
    "lora_id": (),
    "adapter": (),
    "adapter_id": (),
    "reasoning": (),
    "separate_reasoning": (False,),
    "include_reasoning": (True,),
    "thinking_token_budget": (),
    "max_reasoning_tokens": (),
}
"""Fields of other servers that change an answer, each with the values that do not, besides null."""
REASONING_SWITCHES = ("thinking", "enable_thinking")
"""By which chat templates let a model reason, or not."""
_TEMPLATE_SWITCHES = (*REASONING_SWITCHES, "reasoning_effort", "thinking_budget", "verbosity")
"""Fields that reach the chat template, of the body or of chat_template_kwargs."""
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "num_return_sequences": "n",
    "random_seed": "seed",
}


def refuse_unsupported(request: GenerationRequest) -> None:
    """Refuse what would silently change the meaning of the answer if it were ignored.

    Raises:
        RequestError: names the field and what to do.
    """
    unknown = request.model_extra
    if unknown:
        _refuse_unknown(request, unknown)
    if isinstance(request, CompletionRequest):
        _refuse_of_completion(request)
    elif isinstance(request, ChatRequest):
        _refuse_of_chat(request)
    if unknown:
        _refuse_misspelt(request)


def _refuse_unknown(request: GenerationRequest, unknown: Mapping[str, Any]) -> None:
    for name in _CONSTRAINTS:
        if unknown.get(name) is not None:
            raise _unsupported(name, "a constraint", "send structured_outputs or response_format")
    for name, neutral in _NEUTRAL.items():
        value = unknown.get(name)
        if value is not None and value not in neutral and not _is_implied(request, name, value):
            raise _unsupported(name, _short(value), "leave it out")


def _is_implied(request: GenerationRequest, name: str, value: object) -> bool:
    """Whether ``value`` only says once more what another field does; vLLM wants both."""
    return (
        name == "add_generation_prompt"
        and value is False
        and isinstance(request, ChatRequest)
        and bool(request.continue_final_message)
    )


def refuse_switches(request: ChatRequest, model: ServedModel) -> None:
    """Refuse to reason on where the client wants it off and no switch of the template's does it.

    Raises:
        RequestError: names the field.
    """
    if model.formats.reasoning is None:
        return
    for path, name, value in _unread_switches(request, model):
        if name in REASONING_SWITCHES and not _is_on(value):
            raise RequestError(
                f"{path} = {_short(value)!r}: the model's chat template has no such switch, so the "
                "model would reason all the same. Fix: leave it out",
                param=path,
                code="unsupported_value",
            )


def _unread_switches(request: ChatRequest, model: ServedModel) -> list[tuple[str, str, Any]]:
    """Paths, names and values of switches that the chat template does not read: nobody does."""
    template = template_for(request, model)
    read = template.variables if template is not None else frozenset()
    fields, told = request.model_extra or {}, request.chat_template_kwargs or {}
    is_switched = _switches_of(fields, read).keys() & read & {*REASONING_SWITCHES}
    return [
        (prefix + name, name, values[name])
        for prefix, values in (("", fields), ("chat_template_kwargs.", told))
        for name in _TEMPLATE_SWITCHES
        if values.get(name) is not None
        and name not in read
        and not (isinstance(values[name], Mapping) and is_switched)
    ]


def template_variables(request: ChatRequest, read: frozenset[str]) -> dict[str, Any]:
    """What the body tells a chat template that reads the variables ``read``."""
    switches = _switches_of(request.model_extra or {}, read)
    return {**switches, **(request.chat_template_kwargs or {})}


def _switches_of(fields: Mapping[str, Any], read: frozenset[str]) -> dict[str, Any]:
    found = {n: fields[n] for n in _TEMPLATE_SWITCHES if fields.get(n) is not None}
    thinking = found.get("thinking")
    if isinstance(thinking, Mapping):  # as the APIs of DeepSeek, GLM and Kimi have it
        del found["thinking"]
        found |= {name: _is_on(thinking) for name in REASONING_SWITCHES if name in read}
    return found


def _is_on(value: object) -> bool:
    """Whether a switch lets the model reason."""
    return value.get("type") != "disabled" if isinstance(value, Mapping) else bool(value)


def ignored_fields(
    request: GenerationRequest, model: ServedModel, left_out: Sequence[str] = ()
) -> list[str]:
    """Fields that change nothing, and those of ``left_out``, as the client knows them."""
    unknown = [name[:MAX_NAME] for name in _unknown_fields(request)]
    found = [*request.ignored, *unknown, *left_out]
    if isinstance(request, ChatRequest):
        found += request.tools.ignored if request.tools is not None else ()
        found += [path for path, _, _ in _unread_switches(request, model)]
    elif request.model_extra:
        found += [name for name in _TEMPLATE_SWITCHES if request.model_extra.get(name) is not None]
    told = [client_param(name, request.client_names) for name in dict.fromkeys(found)]
    return [re.sub(r"[^A-Za-z0-9_.$\[\]-]", "?", name) for name in told]


def _unknown_fields(request: GenerationRequest) -> list[str]:
    """Names of fields that nobody here knows."""
    if not request.model_extra:
        return []
    known = {*FIELDS, *_CONSTRAINTS, *_NEUTRAL, *_TEMPLATE_SWITCHES}
    return [name for name in request.model_extra if name not in known]


def _refuse_of_completion(request: CompletionRequest) -> None:
    if request.suffix:
        raise _unsupported("suffix", request.suffix[:40], "leave it out")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise _unsupported("best_of", request.best_of, "leave it out, or send the value of n")


def _refuse_of_chat(request: ChatRequest) -> None:
    if request.function_call not in (None, "none", "auto"):
        raise _unsupported("function_call", request.function_call, "send tools and tool_choice")
    _refuse_choice(request)
    if request.max_tool_calls is not None and request.max_tool_calls < 1:
        raise RequestError(
            f"max_tool_calls = {request.max_tool_calls} is out of range. Fix: send an integer from "
            '1 on, or tool_choice = "none"',
            param="max_tool_calls",
        )
    if request.functions and request.function_call != "none":
        raise _unsupported("functions", f"{len(request.functions)} of them", "send them as tools")
    for index, message in enumerate(request.messages):
        if message["role"] == "function":
            raise _unsupported(f"messages[{index}].role", "function", 'send the role "tool"')
        if message.get("function_call"):
            param = f"messages[{index}].function_call"
            raise _unsupported(param, "a call", "send it in tool_calls")
    if request.modalities and request.modalities != ["text"]:
        raise _unsupported("modalities", request.modalities, 'send ["text"] or leave it out')


def _refuse_choice(request: ChatRequest) -> None:
    if request.tool_choice in (None, "none", "auto") or request.named_tool is not None:
        return
    allowed = request.allowed_tools
    if allowed is not None:
        offered = {tool["function"]["name"] for tool in request.tools or ()}
        unknown = sorted(allowed.names - offered)
        if unknown:
            problem = f"tool_choice allows {unknown[0]!r}, which is none of tools"
            raise RequestError(f"{problem}. Fix: send it there, too", param="tool_choice")
    elif request.tool_choice != "required" or not request.tools:
        fix = 'send "auto", "none" or, with tools, "required", or name one of the tools'
        raise _unsupported("tool_choice", request.tool_choice, fix)


def refuse_unread(request: ChatRequest, model: ServedModel) -> None:
    """Refuse what this model's chat template would not read, or what nobody reads in its answers.

    Raises:
        RequestError: names the field.
    """
    template = template_for(request, model)
    assert template is not None
    read_by_template = template.variables
    refuse_switches(request, model)
    if request.tools and request.tool_choice != "none":
        number = f"{len(request.tools)} of them"
        if "tools" not in read_by_template:
            fix = (
                f"send tool_choice = 'none', or set {FIELD} to a file whose template reads "
                f"tools or to one that ships ({', '.join(SHIPPED)})"
            )
            raise _unsupported("tools", f"{number}, which the chat template does not read,", fix)
        if model.formats.calls is None:
            fix = "send tool_choice = 'none', or set router.tool_parser"
            raise _unsupported("tools", f"{number}, whose calls nobody would read,", fix)
    for index, message in enumerate(request.messages):
        history, path = model.call_history, f"messages[{index}]"
        fix = "tell it in a message of the user or the assistant"
        if message["role"] == "tool" and (history is None or not history.reads_results):
            raise _unsupported(f"{path}.role", "tool", fix)
        if message.get("tool_calls") and history is None:
            raise _unsupported(f"{path}.tool_calls", "calls", fix)
    if model.formats.reasoning is None:
        for name, value, neutral in (
            ("separate_reasoning", request.separate_reasoning, False),
            ("include_reasoning", request.include_reasoning, True),
        ):
            if value is not None and value is not neutral:
                raise _unsupported(name, value, "leave it out: the model has no known reasoning")


def _refuse_misspelt(request: GenerationRequest) -> None:
    fields = _unknown_fields(request)
    if len(fields) > MAX_UNKNOWN:
        raise RequestError(
            f"the body has {len(fields)} unknown fields, the first is {fields[0][:MAX_NAME]!r}. "
            f"Fix: send at most {MAX_UNKNOWN}"
        )
    known = [*type(request).model_fields, *FIELDS, *_NEUTRAL, *_CONSTRAINTS, *_TEMPLATE_SWITCHES]
    for name in fields:
        meant = _OTHER_NAMES.get(name) or next(
            iter(difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)), None
        )
        if meant is not None:
            raise RequestError(
                f"{name} is no field of this endpoint. Fix: did you mean {meant}?",
                param=name,
                code="unknown_field",
            )


def _short(value: object) -> object:
    return value if isinstance(value, bool | int | float) else str(value)[:40]


def _unsupported(param: str, value: object, fix: str) -> RequestError:
    return RequestError(
        f"{param} = {value!r} is not supported by this server. Fix: {fix}",
        param=param,
        code="unsupported_value",
    )


def unknown_fields() -> dict[str, list[str]]:
    """Fields that no request has and that are known all the same, by what becomes of them."""
    return {
        "refused, but for values that change nothing": sorted({*_CONSTRAINTS, *_NEUTRAL}),
        "read by some chat templates, else ignored": sorted(_TEMPLATE_SWITCHES),
    }
