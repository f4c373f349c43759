"""A body of ``/v1/responses``, and the chat request that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainValidator

from router.http.fields import Integer, neutral
from router.http.response import Json
from router.http.responses.items import Conversation, conversation_of
from router.http.schema import ChatRequest, validated
from router.http.told import turns_told
from router.http.tools import allowed_tools_of, listed_tools

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
"""The second changes nothing: thoughts come in the open, and can be sent back so."""
MAX_METADATA = 16
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
}
_OF_INPUT = ("model", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
_OF_OUTPUT = (
    *("stream", "temperature", "top_p", "top_logprobs", "top_k", "min_p", "seed", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("min_tokens", "ignore_eos", "stop_token_ids", "cache_salt", "service_tier", "priority"),
    "prompt_cache_key",
)
"""Fields of a chat request that have the same name and meaning here."""


def _tools(value: object) -> list[Json] | None:
    """``tools`` as a chat request has them."""
    tools = listed_tools(value)
    if tools is None:
        return None
    return [_tool(f"[{number}]", tool) for number, tool in enumerate(tools)]


def _tool(where: str, tool: object) -> Json:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or kind != "function":
        raise ValueError(f"{where}.type = {kind!r} is not supported. Fix: send function tools")
    known = ("name", "description", "parameters", "strict")
    for name, given in tool.items():
        if name not in (*known, "type") and given not in (None, False, ["direct"]):
            raise ValueError(f"{where}.{name} is not supported by this server. Fix: leave it out")
    # Templates write what is there, and the SDK's types want fields that say nothing.
    function = {name: tool[name] for name in known if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(value: object) -> str | Json | None:
    """``tool_choice`` as a chat request has it."""
    if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
        return value
    if isinstance(value, Mapping) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
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
    verbosity: Annotated[None, neutral("medium")] = None


class ReasoningConfig(BaseModel):
    """``reasoning``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    effort: str | None = None
    summary: Annotated[None, neutral("auto")] = None
    generate_summary: Annotated[None, neutral("auto")] = None
    context: Annotated[None, neutral("auto")] = None
    mode: Annotated[None, neutral("standard")] = None


class StreamConfig(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_obfuscation: Annotated[None, neutral(False)] = None


class InputRequest(BaseModel):
    """``POST /v1/responses/input_tokens``: all of which a prompt is made."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = None
    input: Annotated[Conversation, PlainValidator(conversation_of)]
    instructions: str | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[Json] | None, PlainValidator(_tools)] = None
    tool_choice: Annotated[str | Json | None, PlainValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Annotated[None, neutral("disabled")] = None
    previous_response_id: _Unsupported = None
    conversation: _Unsupported = None
    personality: _Unsupported = None


class ResponsesRequest(InputRequest):
    """``POST /v1/responses``; ranges are checked in the chat request that it becomes."""

    max_output_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Integer | None = None
    include: Annotated[list[str], PlainValidator(_include)] = []
    stream: bool | None = None
    stream_options: StreamConfig | None = None
    metadata: Annotated[dict[str, str] | None, PlainValidator(_metadata)] = None
    # Harmless: they change no answer here.
    store: bool | None = None
    max_tool_calls: Integer | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
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
    context_management: _Unsupported = None
    access_programs: _Unsupported = None
    image: _Unsupported = None
    moderation: _Unsupported = None
    prompt_cache_options: Annotated[None, neutral({}, {"mode": "implicit"})] = None


def names_of(request: InputRequest | None) -> dict[str, str]:
    """Under which names the client knows the fields of the chat request, its messages included."""
    if request is None:
        return _NAMES
    turns = turns_told(
        [f"input[{number}]" for number in request.input.origins],
        beginning="instructions" if request.instructions else "",
        call_id="call_id",
    )
    places = [f"tools[{number}]" for number in range(len(request.tools or ()))]
    tools = {f"{place}.function": place for place in places}
    return {**_NAMES, **turns, **tools}


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
    if isinstance(request, ResponsesRequest):
        fields |= {name: getattr(request, name) for name in _OF_OUTPUT}
        fields |= {
            "max_completion_tokens": request.max_output_tokens,
            "logprobs": LOGPROBS in request.include or None,
        }
    return validated({n: value for n, value in fields.items() if value is not None}, ChatRequest)


def _response_format(request: InputRequest) -> Json | None:
    """The format as chat requests nest it."""
    found = None if request.text is None else request.text.format
    if found is None or found.get("type") != "json_schema":
        return found
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in found.items() if name != "type"},
    }
