"""A body of ``/v1/responses``, and the chat request that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from router.errors import RequestError
from router.http.apis.error_params import turn_params
from router.http.apis.responses.items import Conversation, conversation_of
from router.http.openai.fields import Integer, neutral
from router.http.openai.hints import IGNORED_INCLUDES, Api, Body, OfferedTools, is_hosted
from router.http.openai.response import Json
from router.http.openai.schema import ChatRequest, validated
from router.http.openai.tools import allowed_tools_of, offered_of, requires

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (LOGPROBS, *IGNORED_INCLUDES)
MAX_METADATA = 16
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "messages": "input",
    "tools.function": "tools",
}
_OF_INPUT = ("model", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
_OF_OUTPUT = (
    "max_tool_calls",
    *("stream", "temperature", "top_p", "top_logprobs", "top_k", "min_p", "seed", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("min_tokens", "ignore_eos", "stop_token_ids", "cache_salt", "service_tier", "priority"),
    "prompt_cache_key",
)
"""Fields of a chat request that have the same name and meaning here."""


def _tools(value: object) -> OfferedTools | None:
    """``tools`` as a chat request has them."""
    return offered_of(value, Api.RESPONSES, _tool)


def _tool(place: int, tool: object) -> Json:
    where, kind = f"[{place}]", tool.get("type") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or kind != "function":
        raise ValueError(f"{where}.type = {kind!r} is not supported. Fix: send function tools")
    known = ("name", "description", "parameters", "strict")
    for name, given in tool.items():
        if name not in (*known, "type") and given not in (None, False):
            raise ValueError(f"{where}.{name} is not supported by this server. Fix: leave it out")
    # Templates write what is there, and the SDK's types want fields that say nothing.
    function = {name: tool[name] for name in known if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(value: object) -> str | Json | None:
    """``tool_choice`` as a chat request has it."""
    if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
        return value
    kind = value.get("type") if isinstance(value, Mapping) else None
    if is_hosted(kind, Api.RESPONSES):
        raise ValueError(requires(kind))
    if isinstance(value, Mapping) and kind == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    if isinstance(value, Mapping) and kind == "allowed_tools":
        tools = value.get("tools")
        if isinstance(tools, list):
            tools = [_choosable(tool) for tool in tools]
        choice: Json = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": value.get("mode"), "tools": tools},
        }
        allowed_tools_of(choice)
        return choice
    raise ValueError(
        f'is {value!r}; it must be "none", "auto", "required" or an object of type "function" or '
        '"allowed_tools"'
    )


def _choosable(tool: object) -> object:
    """A tool that a choice names, as a chat request has it."""
    if not isinstance(tool, Mapping):
        return tool
    return {"type": tool.get("type"), "function": {"name": tool.get("name")}}


def _metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("must be an object of strings")
    if len(value) > MAX_METADATA:
        raise ValueError(f"has {len(value)} entries. Fix: send at most {MAX_METADATA}")
    return value


def _include(value: object) -> list[str]:
    names = [] if value is None else value
    if not isinstance(names, list):
        raise ValueError("must be a list of names")
    for number, name in enumerate(names):
        if name not in _INCLUDABLE:
            raise ValueError(
                f"[{number}] = {name!r} is not supported by this server. "
                f"Fix: send {' or '.join(_INCLUDABLE)}"
            )
    return names


_Unsupported = Annotated[None, neutral(False, "", [], {}, "disabled")]


class TextConfig(BaseModel):
    """``text``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(BaseModel):
    """``reasoning``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    effort: str | None = None
    context: Annotated[None, neutral("auto")] = None
    mode: Annotated[None, neutral("standard")] = None


class StreamConfig(BaseModel):
    """``stream_options``, in which there are hints alone."""

    model_config = ConfigDict(strict=True, extra="forbid")


class InputRequest(Body):
    """``POST /v1/responses/input_tokens``: all of which a prompt is made."""

    api = Api.RESPONSES

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = None
    input: Annotated[Conversation, PlainValidator(conversation_of)]
    instructions: str | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[OfferedTools | None, PlainValidator(_tools)] = None
    tool_choice: Annotated[str | Json | None, PlainValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: _Unsupported = None
    conversation: _Unsupported = None
    personality: _Unsupported = None


class ResponsesRequest(InputRequest):
    """``POST /v1/responses``; ranges are checked in the chat request that it becomes."""

    max_output_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Integer | None = None
    include: Annotated[list[str], PlainValidator(_include)] = Field(default_factory=list)
    stream: bool | None = None
    stream_options: StreamConfig | None = None
    metadata: Annotated[dict[str, str] | None, PlainValidator(_metadata)] = None
    max_tool_calls: Integer | None = None
    # They come back in the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    # Beyond OpenAI's API, as other engines name them.
    top_k: Integer | None = None
    min_p: float | None = None
    seed: Integer | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: Integer | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    cache_salt: str | None = None
    priority: Integer | None = None
    # What needs answers to be stored, or is done nowhere here.
    background: _Unsupported = None
    background_options: _Unsupported = None
    prompt: _Unsupported = None
    access_programs: _Unsupported = None
    image: _Unsupported = None
    moderation: _Unsupported = None


def names_of(request: InputRequest | None) -> dict[str, str]:
    """Under which names the client knows the fields of the chat request, its messages included.

    None: there is none yet, and what is refused has the client's names.
    """
    if request is None:
        return {}
    turns = turn_params(
        [f"input[{number}]" for number in request.input.origins],
        beginning="instructions" if request.instructions else "",
        call_id="call_id",
    )
    tools = request.tools.names() if request.tools is not None else {}
    functions = {f"{ours}.function": theirs for ours, theirs in tools.items()}
    return {**_NAMES, **turns, **tools, **functions}


def as_chat(request: InputRequest) -> ChatRequest:
    """The same as a request of ``/v1/chat/completions``."""
    first = [{"role": "system", "content": request.instructions}] if request.instructions else []
    fields: dict[str, object] = {
        "messages": [*first, *request.input.messages],
        "response_format": _response_format(request),
        **{name: getattr(request, name) for name in _OF_INPUT},
    }
    if request.reasoning is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    if request.text is not None:
        fields["verbosity"] = request.text.verbosity
    if isinstance(request, ResponsesRequest):
        if request.top_logprobs and LOGPROBS not in request.include:
            raise RequestError(
                f"top_logprobs = {request.top_logprobs} is for answers with log-probabilities. "
                f'Fix: send include: ["{LOGPROBS}"]',
                param="top_logprobs",
            )
        fields |= {name: getattr(request, name) for name in _OF_OUTPUT}
        fields |= {
            "max_completion_tokens": request.max_output_tokens,
            "logprobs": LOGPROBS in request.include or None,
        }
    chat = validated({n: value for n, value in fields.items() if value is not None}, ChatRequest)
    chat.ignored.extend(request.ignored)
    if isinstance(request, ResponsesRequest):
        chat.ignored.extend(f"include.{name}" for name in request.include if name != LOGPROBS)
    if request.tools is not None:
        chat.ignored.extend(request.tools.ignored)
    chat.client_names = names_of(request)
    return chat


def _response_format(request: InputRequest) -> Json | None:
    """The format as chat requests nest it."""
    found = None if request.text is None else request.text.format
    if found is None or found.get("type") != "json_schema":
        return found
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in found.items() if name != "type"},
    }
