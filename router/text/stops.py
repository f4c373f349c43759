"""Stop strings over a stream of text. Pure.

Text that may be the beginning of a stop string is held back until it is known not to be. The result
does not depend on how the text is cut into pieces: of all stop strings the one that ends first
wins, and of those that end together the longest. Where there are marks in the text, they come out
whole, or a stop string has cut them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from router.text.marks import Item, Mark, text_of


class StopResult(NamedTuple):
    """What a piece of text set free."""

    text: str
    """To be given to the client now."""
    stopped: str | None
    """The stop string that ended the text, or None."""


class StopStrings:
    """Watches one choice's text. After a stop it must not be fed again."""

    __slots__ = ("_held", "_include", "_stops", "stopped")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """``stops`` are not empty strings; with ``include`` the stop string stays in the text."""
        assert all(stops)
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the text, once one did."""

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
            self.stopped = stop
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


class StoppedItems:
    """The same over items."""

    __slots__ = ("_items", "_num_free", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        """``stops`` are told of nothing else from here on."""
        self._stops = stops
        self._items: deque[Item] = deque()
        """That are held back, the first of them perhaps in part."""
        self._num_free = 0
        """Characters of a mark that are set free while its end is not."""

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string ended the text; nothing may be fed then."""
        return self._stops.stopped is not None

    def feed(self, item: Item) -> Iterator[Item]:
        """What is sure now, with ``item`` added."""
        self._items.append(item)
        yield from self._set_free(len(self._stops.feed(text_of(item)).text))
        if self.has_stopped and self._num_free:
            cut = text_of(self._items.popleft())[: self._num_free]
            self._num_free = 0
            yield cut

    def flush(self) -> Iterator[Item]:
        """What was held back, at the end of the output."""
        yield from self._set_free(len(self._stops.flush()))

    def _set_free(self, num_chars: int) -> Iterator[Item]:
        self._num_free += num_chars
        while self._num_free:
            item = self._items.popleft()
            text = text_of(item)
            if len(text) > self._num_free:
                if isinstance(item, Mark):
                    self._items.appendleft(item)
                    return
                self._items.appendleft(text[self._num_free :])
                item = text[: self._num_free]
            self._num_free -= len(text_of(item))
            yield item
