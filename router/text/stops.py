"""Stop strings over a stream of text. Pure.

Text that may be the beginning of a stop string is held back until it is known not to be. The result
does not depend on how the text is cut into pieces: of all stop strings the one that ends first
wins, and of those that end together the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """What a piece of text set free."""

    text: str
    """To be given to the client now."""
    stopped: str | None
    """The stop string that ended the text, or None."""


class StopStrings:
    """Watches one choice's text. After a stop it must not be fed again."""

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """``stops`` are not empty strings; with ``include`` the stop string stays in the text."""
        assert all(stops)
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def feed(self, piece: str) -> StopResult:
        """Add ``piece``; returns what can no longer become part of a stop string."""
        if not self._stops:
            return StopResult(piece, None)
        if not piece:
            return StopResult("", None)
        text = self._held + piece
        found = self._first_match(text)
        if found is not None:
            start, stop = found
            self._held = ""
            return StopResult(text[: start + len(stop) if self._include else start], stop)
        keep = self._partial_match(text)
        self._held = text[len(text) - keep :]
        return StopResult(text[: len(text) - keep], None)

    def flush(self) -> str:
        """The text that was held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                match = (start + len(stop), start, stop)
                best = match if best is None or match < best else best
        return None if best is None else (best[1], best[2])

    def _partial_match(self, text: str) -> int:
        """Length of the longest suffix of ``text`` with which a stop string begins."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
