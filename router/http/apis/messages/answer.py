"""Messages, events and failures of ``/v1/messages``."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from pydantic_core import from_json

from router.http.apis.blocks import Begin, Block, BlockKind, Blocks, Delta, News
from router.http.apis.dialect import Dialect
from router.http.errors import Failure
from router.http.openai.response import Choice, Json, ResponseInfo
from router.http.wire.sse import TextEvent, event
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
        "output_tokens_details": {"thinking_tokens": choice.text.num_reasoning_tokens},
    }


def _end(choice: Choice, finish_reason: str | None) -> Json:
    """Why an answer ended, in the two fields that tell it."""
    stopped_by = choice.text.stopped_by
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(finish_reason or "")
    if reason is None:
        reason = "end_turn" if stopped_by is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stopped_by}


def _message(info: ResponseInfo, choice: Choice, content: list[Json], end: Json) -> Json:
    return {
        "id": f"msg_{_base_id(info)}",
        "type": "message",
        "role": "assistant",
        "model": info.model,
        "content": content,
        **end,
        "usage": _usage(choice),
    }


def _base_id(info: ResponseInfo) -> str:
    return info.response_id.removeprefix("chatcmpl-")


def _content(info: ResponseInfo, block: Block) -> Json:
    """A block with all that it holds so far."""
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": block.text}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    use_id = block.call_id or f"toolu_{_base_id(info)}.{block.index}"
    use = {"type": "tool_use", "id": use_id, "name": block.name}
    return {**use, "input": arguments_of(block.text)}


def arguments_of(text: str) -> Json:
    """A call's arguments as the object that clients expect, cut off or not.

    What is no object is given as the text that it is.
    """
    try:
        found = from_json(text or "{}", allow_partial=True)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"invalid_arguments": text}


def _named(kind: str, payload: Mapping[str, object]) -> bytes:
    return f"event: {kind}\n".encode() + event({"type": kind, **payload})


_DELTAS = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


class MessageStream:
    """A ``ResponseFormat`` of Anthropic's events: one message of blocks."""

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info
        self._blocks = Blocks()
        self._delta: TextEvent | None = None
        """Of the open block."""

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> bytes:
        """The message without its content."""
        message = _message(self._info, choice, [], {"stop_reason": None, "stop_sequence": None})
        return _named("message_start", {"message": message})

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """What became of the blocks, and the end."""
        if self._delta is not None and self._blocks.is_plain_text(piece):
            return b"event: content_block_delta\n" + self._delta.fill(piece.text)
        data = b"".join(map(self._told, self._blocks.add(piece)))
        if piece.finish_reason is not None:
            end = {"delta": _end(choice, piece.finish_reason), "usage": _usage(choice)}
            data += _named("message_delta", end)
        return data

    def closing(self) -> bytes:
        """The last event."""
        return _named("message_stop", {})

    def _told(self, news: News) -> bytes:
        block = news.block
        if isinstance(news, Delta):
            assert self._delta is not None  # since the block began
            return b"event: content_block_delta\n" + self._delta.fill(news.text)
        if isinstance(news, Begin):
            kind, name = _DELTAS[block.kind]
            delta = {"type": kind, name: TextEvent.HOLE}
            payload = {"type": "content_block_delta", "index": block.index, "delta": delta}
            self._delta = TextEvent(payload)
            start = {"index": block.index, "content_block": _content(self._info, block)}
            return _named("content_block_start", start)
        return _named("content_block_stop", {"index": block.index})


class MessageBody:
    """A ``ResponseFormat`` of one JSON body."""

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info
        self._blocks = Blocks()

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> bytes:
        """Nothing yet."""
        return b""

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """Nothing yet."""
        for _ in self._blocks.add(piece):
            pass
        return b""

    def closing(self) -> bytes:
        """The message."""
        choice, blocks = self._info.choices[0], self._blocks
        content = [_content(self._info, block) for block in blocks.found]
        end = _end(choice, blocks.finish_reason)
        return orjson.dumps(_message(self._info, choice, content, end))
