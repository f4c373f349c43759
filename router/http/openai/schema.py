"""The bodies of the OpenAI endpoints: which fields there are, of which types, not which ranges.

Unknown fields are kept as they are: ``unsupported`` refuses those that would change the answer. A
validation failure becomes one sentence that names the field.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
)

from router.errors import RequestError
from router.http.openai.chat_messages import chat_messages
from router.http.openai.fields import Integer, bias_of_ids, prompt_list, stop_strings
from router.http.openai.hints import Api, Body, OfferedTools, take_hints
from router.http.openai.tools import AllowedTools, allowed_tools_of, checked_choice, checked_tools

MAX_DEPTH = 100
MAX_PARTS = 2**18
MAX_VALUES = 2**21


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Body):
    """What both endpoints share. None: the client did not say."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    n: Integer | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Integer | None = None
    stop: Annotated[list[str], PlainValidator(stop_strings)] = Field(default_factory=list)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(bias_of_ids)] = Field(
        default_factory=dict
    )
    response_format: dict[str, Any] | None = None
    # Beyond OpenAI's API, as other engines name them.
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Integer | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Integer] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Integer | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    timings: bool | None = None
    service_tier: str | None = None
    priority: Integer | None = None

    _client_names: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @property
    def client_names(self) -> Mapping[str, str]:
        """Under which names the client knows fields of this request, where they are others."""
        return self._client_names

    @client_names.setter
    def client_names(self, names: Mapping[str, str]) -> None:
        self._client_names = names

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        options = self.stream_options
        return options is not None and bool(options.include_usage or options.continuous_usage_stats)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    api = Api.COMPLETIONS

    prompt: Annotated[list[str | list[int]], PlainValidator(prompt_list)]
    echo: bool | None = None
    logprobs: Integer | None = None
    suffix: str | None = None
    best_of: Integer | None = None
    add_special_tokens: bool | None = None


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    api = Api.CHAT

    messages: Annotated[list[dict[str, Any]], PlainValidator(chat_messages)]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tools: Annotated[OfferedTools | None, PlainValidator(checked_tools)] = None
    tool_choice: Annotated[str | dict[str, Any] | None, AfterValidator(checked_choice)] = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Integer | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    max_reasoning_tokens: Integer | None = None
    thinking_token_budget: Integer | None = None  # the same, as vLLM names it

    @property
    def named_tool(self) -> str | None:
        """The one tool that ``tool_choice`` names; None: it names none of them."""
        names = [tool["function"]["name"] for tool in self.tools or ()]
        name: object = None
        if isinstance(self.tool_choice, dict):
            function = self.tool_choice.get("function")
            name = function.get("name") if isinstance(function, dict) else None
        return name if isinstance(name, str) and name in names else None

    @property
    def allowed_tools(self) -> AllowedTools | None:
        """Which of the tools may be called; None: all of them, or the named one."""
        return allowed_tools_of(self.tool_choice)

    @property
    def has_to_call(self) -> bool:
        """Whether the answer has to be a call."""
        allowed = self.allowed_tools
        has_to = self.tool_choice == "required" or (allowed is not None and allowed.is_required)
        return has_to or self.named_tool is not None

    @property
    def continues_final(self) -> bool:
        """Whether the answer goes on with the last message."""
        return bool(self.continue_final_message or self.messages[-1].get("prefix"))


RequestT = TypeVar("RequestT", bound=BaseModel)


def parse_body(body: bytes, request_type: type[RequestT]) -> RequestT:
    """The request in ``body``.

    Raises:
        RequestError: it is no JSON object, or a field is missing or of the wrong type.
    """
    _check_size(body)
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(
            f"the body is no valid JSON: {error}. Fix: send one JSON object"
        ) from error
    if not isinstance(fields, dict):
        found = type(fields).__name__
        raise RequestError(f"the body is a JSON {found}. Fix: send one JSON object")
    for name, value in fields.items():
        # "prompt" has a shape of its own, and perhaps a million ids.
        if isinstance(value, dict | list) and name != "prompt":
            check_depth(name, value)
    return validated(fields, request_type)


def validated(fields: dict[str, Any], request_type: type[RequestT]) -> RequestT:
    """The request that ``fields`` are; hints are taken out of them.

    Raises:
        RequestError: a field is missing, of the wrong type, or none of the endpoint.
    """
    ignored = take_hints(fields, request_type.api) if issubclass(request_type, Body) else []
    try:
        request = request_type.model_validate(fields)
    except ValidationError as error:
        raise _first_problem(error, fields) from error
    if isinstance(request, Body):
        request.ignored.extend(ignored)
    return request


def _check_size(body: bytes) -> None:
    """Refuse what would take long to parse: the parser lets nothing else run meanwhile.

    Texts and ids are cheap, values of many parts are not. What stands within a text is counted as
    well, escaped quotation marks apart: the bounds leave room for that.
    """
    num_parts = body.count(b"[") + body.count(b"{") + body.count(b'"') - body.count(b'\\"')
    if num_parts > MAX_PARTS:
        raise RequestError(
            f"the body has {num_parts} lists, objects and strings. "
            f"Fix: send at most {MAX_PARTS} of them"
        )
    if (num_values := body.count(b",")) > MAX_VALUES:
        raise RequestError(
            f"the body has {num_values} values. Fix: send at most {MAX_VALUES} of them"
        )


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def check_depth(name: str, value: object) -> None:
    """Refuse what others walk through by recursion: validation, rendering, JSON in templates."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise RequestError(
        f"{name} is nested too deep. Fix: send at most {MAX_DEPTH} levels", param=name
    )


_WANTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def _first_problem(error: ValidationError, fields: Mapping[str, object]) -> RequestError:
    """One sentence on the first thing that is wrong."""
    problem = error.errors(include_url=False, include_context=False)[0]
    location = problem["loc"]
    param = _path(location)
    kind = problem["type"]
    if kind == "missing":
        return RequestError(f"{param} is missing. Fix: send it", param=param)
    if kind in ("none_required", "extra_forbidden"):
        is_known = kind == "none_required"
        why = "is not supported by this server" if is_known else "is no field of this endpoint"
        code = "unsupported_value" if is_known else "unknown_field"
        return RequestError(f"{param} {why}. Fix: leave it out", param=param, code=code)
    if kind == "value_error":
        text = problem["msg"].removeprefix("Value error, ")
        place = re.match(r"[^ ]*[^ :]", text) if text.startswith("[") else None
        joint = " " if place is None else ""
        return RequestError(f"{param}{joint}{text}", param=param + (place.group() if place else ""))
    wanted = _WANTED.get(kind, "of another type")
    if kind == "literal_error":
        wanted = "one of " + problem["msg"].removeprefix("Input should be ").replace(" or ", ", ")
    if param in ("tool_choice", "function_call"):
        wanted = "a string or an object"
    shown = reprlib.repr(problem["input"])
    return RequestError(f"{param} = {shown}: it must be {wanted}. Fix: send {wanted}", param=param)


def _path(location: tuple[int | str, ...]) -> str:
    """``("stop_token_ids", 1)`` as ``stop_token_ids[1]``; names of union branches are left out.

    Such a name is that of a type, as "str" or "list[int]", and never the first part.
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not path or not (part == "str" or "[" in part):
            path += f".{part}" if path else part
    return path
