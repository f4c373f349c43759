"""What a parser of calls says. Text that it has taken comes out in one of these, or is syntax."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from router.text.marks import Item


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class CallBegin(NamedTuple):
    """A call of an offered tool begins."""

    name: str
    call_id: str | None = None
    """As the model wrote it, which knows the call's result by it; None: it writes none."""


NO_ARGUMENTS = "{}"
"""What a call without arguments is given as them."""


class Arguments(NamedTuple):
    """A piece of the arguments of the call that began last."""

    text: str


class CallEnd(NamedTuple):
    """The call that began last is whole."""


CallEvent = Content | CallBegin | Arguments | CallEnd

Offered = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each offered tool's arguments, by the tool's name."""


class StrayText:
    """Text of a call where its format has none but white space, from one mark to the next.

    The white space is the format's own. If anything else stands there, all of it is of the answer,
    however it is cut.
    """

    __slots__ = ("_has_words", "_space")

    def __init__(self) -> None:
        """Behind a mark."""
        self._space = ""
        self._has_words = False

    def feed(self, text: str) -> Iterator[CallEvent]:
        """What is sure now."""
        text, self._space = self._space + text, ""
        self._has_words |= bool(text.strip())
        if not self._has_words:
            self._space = text
        elif text:
            yield Content(text)


class CallParser(Protocol):
    """The output of one choice, behind its reasoning. Not fed after ``flush``."""

    def feed(self, item: Item) -> Iterator[CallEvent]:
        """What is sure now; to be read to the end before the next call."""

    def flush(self) -> Iterator[CallEvent]:
        """What was held back, at the end of the output."""


NewCallParser = Callable[[Offered], CallParser]
