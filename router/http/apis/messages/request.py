"""A body of ``/v1/messages``, and the chat request that it becomes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, PlainValidator

from router.http.apis.error_params import turn_params
from router.http.apis.messages.tools import ToolChoice, tool_choice_of, tools_of
from router.http.apis.messages.turns import Turns, text_of, turns_of
from router.http.openai.fields import Integer, neutral
from router.http.openai.hints import Api, Body, OfferedTools
from router.http.openai.response import Json
from router.http.openai.schema import ChatRequest, validated
from router.http.openai.unsupported import REASONING_SWITCHES
from router.model import ServedModel

_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "tools.function": "tools",
}
"""Fields of a chat request that have another name here."""


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


class CountRequest(Body):
    """``POST /v1/messages/count_tokens``: all of which a prompt is made."""

    api = Api.MESSAGES

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = None
    messages: Annotated[Turns, PlainValidator(turns_of)]
    system: Annotated[str | None, PlainValidator(_system)] = None
    tools: Annotated[OfferedTools | None, PlainValidator(tools_of)] = None
    tool_choice: Annotated[ToolChoice | None, PlainValidator(tool_choice_of)] = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    speed: Annotated[None, neutral("standard")] = None
    user_profile_id: _Unsupported = None
    workspace_id: _Unsupported = None
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
    container: _Unsupported = None
    inference_geo: _Unsupported = None

    @property
    def tells_thoughts(self) -> bool:
        """Whether the client wants to see what the model thinks."""
        thinking = self.thinking
        if thinking is None or thinking.type == "disabled":
            return False
        return thinking.display != "omitted"


def names_of(request: CountRequest | None) -> dict[str, str]:
    """Under which names the client knows the fields of the chat request, its messages included.

    None: there is none yet, and what is refused has the client's names.
    """
    if request is None:
        return {}
    turns = turn_params(
        [f"messages[{number}]" for number in request.messages.origins],
        beginning="system" if request.system else "",
        call_id="tool_use_id",
    )
    found = {**_NAMES, **turns}
    for ours, theirs in (request.tools.names() if request.tools is not None else {}).items():
        found |= {ours: theirs, f"{ours}.function": theirs}
        found[f"{ours}.function.parameters"] = f"{theirs}.input_schema"
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
    }
    switches, unread = _thinking(request, model)
    fields["chat_template_kwargs"] = switches or None
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
    chat = validated({n: value for n, value in fields.items() if value is not None}, ChatRequest)
    chat.ignored.extend([*request.ignored, *unread])
    if request.tools is not None:
        chat.ignored.extend(request.tools.ignored)
    chat.client_names = names_of(request)
    return chat


def _thinking(request: CountRequest, model: ServedModel) -> tuple[Json, list[str]]:
    """What tells the chat template whether to think, how much, and fields that nobody reads.

    Thoughts that are not wanted are left out of the answer, whether they can be turned off or not.
    """
    thinking = request.thinking
    if thinking is None:
        return {}, []
    wanted = thinking.type != "disabled"
    offers_tools = request.tools and (
        request.tool_choice is None or request.tool_choice.tool_choice != "none"
    )
    template = model.tool_template if offers_tools else model.chat_template
    variables = template.variables if template is not None else frozenset()
    switches: Json = {name: wanted for name in REASONING_SWITCHES if name in variables}
    if wanted and model.formats.reasoning is None:
        return switches, ["thinking"]
    if wanted and thinking.budget_tokens is not None:
        if "thinking_budget" not in variables:
            return switches, ["thinking.budget_tokens"]
        switches["thinking_budget"] = thinking.budget_tokens
    return switches, []


def _response_format(config: OutputConfig) -> Json | None:
    """The format as chat requests nest it."""
    found = config.format
    if found is None or found.get("type") != "json_schema":
        return found
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": found.get("schema"), "strict": True},
    }
