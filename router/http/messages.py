"""``/v1/messages`` in Anthropic's shape: from its body to a chat request, and its answers. Pure.

What is asked for is translated into a request of ``/v1/chat/completions``, which is then served
like any other; ``NAMES`` says under which name a client knows each field of that. Text alone is
read and written: what a model thinks is counted among its tokens, and left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, PlainValidator

from router.http.dialect import Dialect
from router.http.errors import Failure
from router.http.response import Choice, Json, ResponseInfo, sum_texts
from router.http.schema import ChatRequest, neutral, validated
from router.http.sse import TextEvent, event
from router.text.output import Piece
from runtime.pb import prefill_pb2

NAMES = {"stop": "stop_sequences"}
"""Fields of a chat request that have another name here."""
_BLOCK = ("type", "text", "cache_control", "citations")
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By HTTP status; others below 500 are invalid requests, and else the API's own."""


def _text(path: str, content: object) -> str:
    """A content as one text; it is a string or text blocks, of which all are cached anyway."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{path} must be a string or a list of text blocks".lstrip())
    return "".join(_text_of_block(f"{path}[{n}]", block) for n, block in enumerate(content))


def _text_of_block(path: str, block: object) -> str:
    if not isinstance(block, Mapping):
        raise ValueError(f"{path} must be a text block")
    if block.get("type") != "text":
        kind = block.get("type")
        raise ValueError(f"{path}.type = {kind!r} is not supported by this server. Fix: send text")
    if not isinstance(block.get("text"), str):
        raise ValueError(f"{path}.text must be a string")
    for name, value in block.items():
        if name not in _BLOCK or (name == "citations" and value):
            raise ValueError(f"{path}.{name} is not supported by this server. Fix: leave it out")
    return str(block["text"])


def _system(value: object) -> str | None:
    return None if value is None else _text("", value)


def _turns(value: object) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of at least one message")
    return [_turn(f"[{index}]", turn) for index, turn in enumerate(value)]


def _turn(path: str, turn: object) -> dict[str, str]:
    if not isinstance(turn, Mapping):
        raise ValueError(f"{path} must be an object with role and content")
    role = turn.get("role")
    if role not in ("user", "assistant"):
        raise ValueError(f"{path}.role = {role!r}: it must be user or assistant")
    for name in turn:
        if name not in ("role", "content"):
            raise ValueError(f"{path}.{name} is not supported by this server. Fix: leave it out")
    return {"role": role, "content": _text(f"{path}.content", turn.get("content"))}


_Unsupported = Annotated[None, neutral([], {}, {"type": "none"}, {"type": "disabled"})]


class MessagesRequest(BaseModel):
    """``POST /v1/messages``; ranges are checked in the chat request that it becomes."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = None
    max_tokens: int
    messages: Annotated[list[dict[str, str]], PlainValidator(_turns)]
    system: Annotated[str | None, PlainValidator(_system)] = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    service_tier: str | None = None
    # Harmless: they change no answer here.
    metadata: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    tools: _Unsupported = None
    tool_choice: _Unsupported = None
    thinking: _Unsupported = None
    container: _Unsupported = None
    context_management: _Unsupported = None
    mcp_servers: _Unsupported = None
    output_config: _Unsupported = None
    output_format: _Unsupported = None


_TIER_NAMES = {"standard_only": "default"}


def as_chat(request: MessagesRequest) -> ChatRequest:
    """The same as a request of ``/v1/chat/completions``; a last turn of the assistant goes on."""
    system = [{"role": "system", "content": request.system}] if request.system else []
    fields: dict[str, object] = {
        "model": request.model,
        "messages": [*system, *request.messages],
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        # "standard_only" is Anthropic's word against its priority tier.
        "service_tier": _TIER_NAMES.get(request.service_tier or "", request.service_tier),
        "continue_final_message": request.messages[-1]["role"] == "assistant",
    }
    return validated(fields, ChatRequest)


def _failure(failure: Failure, request_id: str) -> Json:
    usual = "invalid_request_error" if failure.status < 500 else "api_error"
    kind = _ERROR_TYPES.get(failure.status, usual)
    error = {"type": kind, "message": failure.message}
    return {"type": "error", "error": error, "request_id": request_id}


ANTHROPIC = Dialect(
    failure=_failure,
    event_of=lambda failure, request_id: b"event: error\n" + event(_failure(failure, request_id)),
    done=b"",
)


def _usage(choice: Choice) -> Json:
    num_cached = choice.generation.num_cached_tokens
    return {
        "input_tokens": len(choice.prompt.token_ids) - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": choice.text.num_tokens,
    }


def _end(choice: Choice, finish_reason: str) -> Json:
    """Why an answer ended, in the two fields that tell it."""
    stopped_by = choice.text.stopped_by
    if finish_reason == "length":
        reason = "max_tokens"
    else:
        reason = "end_turn" if stopped_by is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stopped_by}


def _message(info: ResponseInfo, choice: Choice, content: list[Json], end: Json) -> Json:
    return {
        "id": f"msg_{info.response_id.removeprefix('chatcmpl-')}",
        "type": "message",
        "role": "assistant",
        "model": info.model,
        "content": content,
        **end,
        "usage": _usage(choice),
    }


def _named(kind: str, payload: Mapping[str, object]) -> bytes:
    return f"event: {kind}\n".encode() + event({"type": kind, **payload})


class MessageStream:
    """A ``ResponseFormat`` of Anthropic's events: one message with one block of text."""

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info
        hole = {"type": "text_delta", "text": TextEvent.HOLE}
        self._delta = TextEvent({"type": "content_block_delta", "index": 0, "delta": hole})

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> bytes:
        """The message without its text, and the block's beginning."""
        message = _message(self._info, choice, [], {"stop_reason": None, "stop_sequence": None})
        block = {"index": 0, "content_block": {"type": "text", "text": ""}}
        return _named("message_start", {"message": message}) + _named("content_block_start", block)

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """Text, and the end."""
        data = b""
        if piece.text:
            data = b"event: content_block_delta\n" + self._delta.fill(piece.text)
        if piece.finish_reason is not None:
            end = {"delta": _end(choice, piece.finish_reason), "usage": _usage(choice)}
            data += _named("content_block_stop", {"index": 0}) + _named("message_delta", end)
        return data

    def closing(self) -> bytes:
        """The last event."""
        return _named("message_stop", {})


class MessageBody:
    """A ``ResponseFormat`` of one JSON body."""

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info
        self._pieces: list[Piece] = []

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> bytes:
        """Nothing yet."""
        return b""

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """Nothing yet."""
        self._pieces.append(piece)
        return b""

    def closing(self) -> bytes:
        """The message."""
        choice = self._info.choices[0]
        text = sum_texts(self._pieces)
        end = _end(choice, self._pieces[-1].finish_reason or "stop")
        content: list[Json] = [{"type": "text", "text": text}] if text else []
        return orjson.dumps(_message(self._info, choice, content, end))
