"""Server-sent events as OpenAI clients read them: ``data: JSON``, a blank line, at last ``[DONE]``.

On the token path an event is a prefix and a suffix rendered once per choice with one JSON string
between. orjson writes non-ASCII as UTF-8, so no character is ever split by an escape.
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
    """An event that differs only in one string: rendered once, filled per token."""

    __slots__ = ("_prefix", "_suffix")

    HOLE = _HOLE
    """Stands in the template's payload where the text goes; may occur once."""

    def __init__(self, payload: object) -> None:
        """``payload`` contains ``TextEvent.HOLE`` once, as a whole string value."""
        prefix, found, suffix = event(payload).partition(_HOLE_JSON)
        assert found, "the payload has no hole"
        self._prefix = prefix
        self._suffix = suffix

    def fill(self, text: str) -> bytes:
        """The event with ``text`` in the hole."""
        return self._prefix + orjson.dumps(text) + self._suffix
