"""A body of ``/v1/messages``, and the chat request that it becomes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, PlainValidator

from router.errors import RequestError
from router.http.fields import Integer, neutral
from router.http.messages.tools import ToolChoice, tool_choice_of, tools_of
from router.http.messages.turns import Turns, text_of, turns_of
from router.http.response import Json
from router.http.schema import ChatRequest, validated
from router.http.told import turns_told
from router.model import ServedModel

_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""Fields of a chat request that have another name here."""
_SWITCHES = ("thinking", "enable_thinking")
"""By which chat templates let a model think, or not."""
BUDGET = "thinking.budget_tokens"


def _system(value: object) -> str | None:
    return None if value is None else text_of("", value)


class Thinking(BaseModel):
    """``thinking``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Integer | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(BaseModel):
    """``output_config``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    effort: str | None = None
    format: dict[str, Any] | None = None


_Unsupported = Annotated[None, neutral([], {}, {"type": "none"}, {"type": "disabled"})]


class CountRequest(BaseModel):
    """``POST /v1/messages/count_tokens``: all of which a prompt is made."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = None
    messages: Annotated[Turns, PlainValidator(turns_of)]
    system: Annotated[str | None, PlainValidator(_system)] = None
    tools: Annotated[list[Json] | None, PlainValidator(tools_of)] = None
    tool_choice: Annotated[ToolChoice | None, PlainValidator(tool_choice_of)] = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Harmless: they change no answer here.
    cache_control: dict[str, Any] | None = None
    speed: Annotated[None, neutral("standard")] = None
    user_profile_id: _Unsupported = None
    workspace_id: _Unsupported = None
    context_management: _Unsupported = None
    mcp_servers: _Unsupported = None
    output_format: _Unsupported = None


class MessagesRequest(CountRequest):
    """``POST /v1/messages``; ranges are checked in the chat request that it becomes."""

    max_tokens: Integer
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    service_tier: str | None = None
    # Harmless: it changes no answer here.
    metadata: dict[str, Any] | None = None
    container: _Unsupported = None
    diagnostics: _Unsupported = None
    inference_geo: _Unsupported = None

    @property
    def tells_thoughts(self) -> bool:
        """Whether the client wants to see what the model thinks."""
        thinking = self.thinking
        if thinking is None or thinking.type == "disabled":
            return False
        return thinking.display != "omitted"


def names_of(request: CountRequest | None) -> dict[str, str]:
    """Under which names the client knows the fields of the chat request, its messages included."""
    if request is None:
        return _NAMES
    turns = turns_told(
        [f"messages[{number}]" for number in request.messages.origins],
        beginning="system" if request.system else "",
        call_id="tool_use_id",
    )
    return {**_NAMES, **turns, **_names_of_tools(len(request.tools or ()))}


def _names_of_tools(num_tools: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for number in range(num_tools):
        function = f"tools[{number}].function"
        found |= {function: f"tools[{number}]"}
        found |= {f"{function}.parameters": f"tools[{number}].input_schema"}
    return found


def as_chat(request: CountRequest, model: ServedModel) -> ChatRequest:
    """The same as a request of ``/v1/chat/completions``; a last turn of the assistant goes on.

    Raises:
        RequestError: ``model`` cannot do what is asked for.
    """
    system = [{"role": "system", "content": request.system}] if request.system else []
    fields: dict[str, object] = {
        "model": request.model,
        "messages": [*system, *request.messages.messages],
        "tools": request.tools,
        "continue_final_message": request.messages.ends_with_assistant,
        **_thinking(request, model),
    }
    if request.tool_choice is not None:
        fields["tool_choice"] = request.tool_choice.tool_choice
        fields["parallel_tool_calls"] = request.tool_choice.parallel_tool_calls
    if request.output_config is not None:
        fields["response_format"] = _response_format(request.output_config)
        fields["reasoning_effort"] = request.output_config.effort
    if isinstance(request, MessagesRequest):
        fields["stop"] = request.stop_sequences
        # "standard_only" is Anthropic's word against its own better tier.
        is_standard = request.service_tier == "standard_only"
        fields["service_tier"] = "default" if is_standard else request.service_tier
        for name in ("max_tokens", "stream", "temperature", "top_p", "top_k"):
            fields[name] = getattr(request, name)
        if model.formats.reasoning is not None and not request.tells_thoughts:
            fields["include_reasoning"] = False
    return validated({n: value for n, value in fields.items() if value is not None}, ChatRequest)


def _thinking(request: CountRequest, model: ServedModel) -> Json:
    """What turns the model's thoughts on or off.

    A budget is told to a template that reads one; to others it is an unknown field, which the
    answer's headers say is ignored.
    """
    thinking = request.thinking
    if thinking is None:
        return {}
    wanted = thinking.type != "disabled"
    if wanted and model.formats.reasoning is None:
        raise RequestError(
            f"thinking.type = {thinking.type!r} is not supported: the model has no known "
            "reasoning. Fix: leave it out",
            param="thinking.type",
            code="unsupported_value",
        )
    offers_tools = request.tools and (
        request.tool_choice is None or request.tool_choice.tool_choice != "none"
    )
    template = model.tool_template if offers_tools else model.chat_template
    variables = template.variables if template is not None else frozenset()
    switches: Json = {name: wanted for name in _SWITCHES if name in variables}
    told: Json = {}
    if wanted and thinking.budget_tokens is not None:
        if "thinking_budget" in variables:
            switches["thinking_budget"] = thinking.budget_tokens
        else:
            told[BUDGET] = thinking.budget_tokens
    return {**told, "chat_template_kwargs": switches} if switches else told


def _response_format(config: OutputConfig) -> Json | None:
    """The format as chat requests nest it."""
    found = config.format
    if found is None or found.get("type") != "json_schema":
        return found
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": found.get("schema"), "strict": True},
    }
