"""Server-sent events as OpenAI clients read them: ``data: JSON``, a blank line, at last ``[DONE]``.

On the token path an event is what stands around one JSON string, rendered once per choice. orjson
writes non-ASCII as UTF-8, so no character is ever split by an escape.
"""

from __future__ import annotations

import orjson

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_HOLE = "\x00"
_HOLE_JSON = orjson.dumps(_HOLE)


def event(payload: object) -> bytes:
    """One event that carries ``payload`` as JSON."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


class TextEvent:
    """An event that differs only in one text: rendered once, filled per token."""

    __slots__ = ("_around",)

    HOLE = _HOLE
    """Stands in the template's payload where the text goes."""

    def __init__(self, payload: object) -> None:
        """``payload`` contains ``TextEvent.HOLE`` at least once, as a whole string value."""
        self._around = event(payload).split(_HOLE_JSON)
        assert len(self._around) > 1, "the payload has no hole"

    @property
    def around_text(self) -> tuple[bytes, bytes]:
        """What stands before and after the JSON of a text without its quotes; of one hole."""
        before, after = self._around
        return before + b'"', b'"' + after

    def fill(self, text: str) -> bytes:
        """The event with ``text`` in the holes."""
        return orjson.dumps(text).join(self._around)
