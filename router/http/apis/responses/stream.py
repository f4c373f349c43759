"""The events of ``/v1/responses``, in the order that OpenAI's clients rely on.

The response is created and in progress; each item is added, its part is added, grows and is done,
and the item is done; the response is completed, or incomplete, or it failed.
"""

from __future__ import annotations

from collections.abc import Callable

import orjson

from router.http.apis.blocks import Begin, Block, BlockKind, Delta, News
from router.http.apis.responses.answer import IN_PROGRESS, Answer
from router.http.errors import Failure
from router.http.openai.response import Choice, Json
from router.http.wire.sse import TextEvent, event
from router.text.output import Piece
from runtime.pb import prefill_pb2

_TEXT = {
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.CALL: "response.function_call_arguments",
}
"""The beginnings of the names of what tells a block's text."""


class ResponseEvents:
    """A ``ResponseFormat`` of OpenAI's named and numbered events."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._number = 0
        self._fill: Callable[[str, int], bytes] | None = None
        """Writes more of the open text: what differs is the text and the number."""

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> bytes:
        """The response without its output."""
        response = self._answer.response(IN_PROGRESS)
        return self._event("response.created", {"response": response}) + self._event(
            "response.in_progress", {"response": response}
        )

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """What became of the items."""
        answer = self._answer
        if self._fill is not None and answer.blocks.is_plain_text(piece):
            answer.blocks.found[-1].texts.append(piece.text)
            self._number += 1
            return self._fill(piece.text, self._number - 1)
        self._fill = None
        logprobs: list[Json] | None = None
        data = []
        for news in answer.blocks.add(piece):
            if isinstance(news, Delta) and news.block.kind is BlockKind.TEXT and logprobs is None:
                logprobs = answer.logprobs(piece)
                data.append(self._told(news, logprobs))
            else:
                data.append(self._told(news, []))
        return b"".join(data)

    def closing(self) -> bytes:
        """The response with all that is in it."""
        response = self._answer.final()
        return self._event(f"response.{response['status']}", {"response": response})

    def failed(self, failure: Failure, request_id: str) -> bytes:
        """A failure after the headers were sent: an error, and the response as far as it came."""
        data = b""
        if self._number == 0:
            data = self._event("response.created", {"response": self._answer.response(IN_PROGRESS)})
        told = {"code": failure.code, "message": failure.message, "param": failure.param}
        # Clients look for these at the top or within, and raise for the latter.
        error = {**told, **failure.body(request_id)}
        response = self._answer.response("failed", failure)
        return (
            data
            + self._event("error", error)
            + self._event("response.failed", {"response": response})
        )

    def _told(self, news: News, logprobs: list[Json]) -> bytes:
        block = news.block
        place: Json = {"output_index": block.index}
        if isinstance(news, Begin):
            item = self._answer.item(block, IN_PROGRESS)
            data = self._event("response.output_item.added", {**place, "item": item})
            if block.kind is BlockKind.CALL:
                return data
            part = {**self._part_of(block), "part": self._answer.part(block)}
            return data + self._event("response.content_part.added", part)
        if isinstance(news, Delta):
            return self._delta(news, logprobs)
        return self._done(block)

    def _part_of(self, block: Block) -> Json:
        """Where a block's text is."""
        place: Json = {"item_id": self._answer.item_id(block), "output_index": block.index}
        return place if block.kind is BlockKind.CALL else {**place, "content_index": 0}

    def _delta(self, news: Delta, logprobs: list[Json]) -> bytes:
        block = news.block
        name, place = f"{_TEXT[block.kind]}.delta", self._part_of(block)
        if block.kind is BlockKind.TEXT:
            place["logprobs"] = logprobs
            if not self._answer.wants_logprobs:
                self._fill = _filler(name, place)
        return self._event(name, {**place, "delta": news.text})

    def _done(self, block: Block) -> bytes:
        """The text whole, its part, and its item."""
        name, place = f"{_TEXT[block.kind]}.done", self._part_of(block)
        answer = self._answer
        item = {"output_index": block.index, "item": answer.item(block)}
        if block.kind is BlockKind.CALL:
            whole = {**place, "name": block.name, "arguments": block.text}
            return self._event(name, whole) + self._event("response.output_item.done", item)
        part = answer.part(block)
        whole = {**place, "text": block.text}
        if block.kind is BlockKind.TEXT:
            whole["logprobs"] = part["logprobs"]
        return (
            self._event(name, whole)
            + self._event("response.content_part.done", {**place, "part": part})
            + self._event("response.output_item.done", item)
        )

    def _event(self, kind: str, payload: Json) -> bytes:
        number, self._number = self._number, self._number + 1
        name = f"event: {kind}\n".encode()
        return name + event({"type": kind, **payload, "sequence_number": number})


def _filler(kind: str, place: Json) -> Callable[[str, int], bytes]:
    """Writes events of ``kind`` that differ in their text and their number alone."""
    payload = {"type": kind, **place, "delta": TextEvent.HOLE, "sequence_number": 0}
    around = TextEvent(payload).fill("").split(b'"","sequence_number":0')
    before, after = f"event: {kind}\n".encode() + around[0], around[-1]

    def fill(text: str, number: int) -> bytes:
        return b'%b%b,"sequence_number":%d%b' % (before, orjson.dumps(text), number, after)

    return fill
