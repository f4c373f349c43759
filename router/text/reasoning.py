"""Tells what a model thinks from what it answers. Pure.

The template may have opened the reasoning already (its prompt ends with the opening mark), may have
closed it (a switch of the request turned it off), or leaves it to the model, whose answer then
begins with the opening mark or has no reasoning. A mark anywhere else is text: reasoning happens
once, and first. A model may leave out the closing mark and go on with a call: the call ends it.
It may leave out the opening mark of thoughts that it does not have: the closing mark is no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from router.text.marks import Item, Mark, text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models marks its reasoning."""

    opening: str = "<think>"
    closing: str = "</think>"
    always_open: bool = False
    """The model reasons from its first token on where nothing says otherwise."""

    @property
    def marks(self) -> tuple[str, str]:
        """All of them."""
        return self.opening, self.closing

    def start_of(self, prompt: str, continued: str | None) -> Start:
        """What the rendered ``prompt`` says about the output.

        Args:
            prompt: as the template wrote it; no client can spell a mark at its end.
            continued: what the model has said already of the message that it goes on with.
        """
        if continued is not None:
            closed = continued.rfind(self.closing)
            opened = continued.rfind(self.opening)
            if max(closed, opened) >= 0:
                return Start.OPEN if opened > closed else Start.CLOSED
        ending = prompt.rstrip().removesuffix((continued or "").strip()).rstrip()
        if ending.endswith(self.closing):
            return Start.CLOSED
        if ending.endswith(self.opening):
            return Start.OPEN
        return Start.OPEN if self.always_open and continued is None else Start.UNDECIDED


class Start(Enum):
    """Where an output begins."""

    UNDECIDED = auto()
    """Its first mark or text tells."""
    OPEN = auto()
    CLOSED = auto()


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat(),
    "deepseek-r1": ReasoningFormat(always_open=True),
}
"""By the names that ``router.reasoning_parser`` may have besides "auto" and "none"."""


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """The format called ``name``; "auto": that of the chat template, None where it has none."""
    if name != "auto":
        return REASONING_FORMATS.get(name)
    usual = REASONING_FORMATS["think"]
    return usual if usual.closing in template else None


class Reasoning(NamedTuple):
    """Text of the reasoning."""

    text: str


class Boundary(NamedTuple):
    """Reasoning begins or ends here: the line breaks around are the template's."""


class ReasoningParser:
    """Watches one choice's items; what is no reasoning is passed on."""

    __slots__ = ("_before", "_format", "_lacks_end", "_state")

    def __init__(self, fmt: ReasoningFormat, start: Start) -> None:
        """``start``: where the output begins."""
        self._format = fmt
        self._state = start
        self._before = ""
        """White space that may yet come before the opening mark."""
        self._lacks_end = False
        """It is over, and its closing mark may yet come."""

    @property
    def is_over(self) -> bool:
        """Whether all that follows is answer."""
        return self._state is Start.CLOSED

    @property
    def is_open(self) -> bool:
        """Whether the model is reasoning."""
        return self._state is Start.OPEN

    def is_closing(self, item: Item) -> bool:
        """Whether ``item`` ends the reasoning that is open."""
        return item == Mark(self._format.closing)

    def end(self) -> None:
        """What follows is no reasoning, though no mark says so."""
        self._state, self._lacks_end = Start.CLOSED, True

    def feed(self, item: Item) -> Iterator[Item | Reasoning | Boundary]:
        """What ``item`` is."""
        if self._state is Start.OPEN:
            if self.is_closing(item):
                self._state = Start.CLOSED
                yield Boundary()
            else:
                yield Reasoning(text_of(item))
        elif self._state is Start.UNDECIDED:
            yield from self._decide(item)
        elif self._lacks_end and self.is_closing(item):
            self._lacks_end = False
        else:
            yield item

    def flush(self) -> Iterator[Item]:
        """What was held back, at the end of the output."""
        if self._before:
            yield self._before

    def _decide(self, item: Item) -> Iterator[Item | Boundary]:
        if isinstance(item, str) and item.isspace():
            self._before += item
            return
        before, self._before = self._before, ""
        if item == Mark(self._format.opening) or self.is_closing(item):
            self._state = Start.CLOSED if self.is_closing(item) else Start.OPEN
            yield Boundary()
            return
        self._state = Start.CLOSED
        if before:
            yield before
        yield item
