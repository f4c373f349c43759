"""Messages, events and failures of ``/v1/messages``."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from router.http.dialect import Dialect
from router.http.errors import Failure
from router.http.response import Choice, Json, ResponseInfo, sum_texts
from router.http.sse import TextEvent, event
from router.text.output import Piece
from runtime.pb import prefill_pb2

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
