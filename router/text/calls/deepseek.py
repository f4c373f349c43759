"""Calls between marks of their own, as DeepSeek's models write them, with name and arguments.

V3 and R1::

    <calls begin><call begin>function<sep>NAME
    ```json
    ARGUMENTS
    ```<call end><calls end>

V3.1: ``<calls begin><call begin>NAME<sep>ARGUMENTS<call end><calls end>``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import NamedTuple

import orjson

from router.text.calls.events import (
    NO_ARGUMENTS,
    Arguments,
    CallBegin,
    CallEnd,
    CallEvent,
    Content,
    Offered,
)
from router.text.marks import Item, Mark

CALLS_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
CALL_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"


class CallMarks(NamedTuple):
    """What stands around all calls, around each, and before its arguments."""

    calls_begin: str
    call_begin: str
    separator: str
    call_end: str
    calls_end: str


DEEPSEEK_MARKS = CallMarks(CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END)
_FENCE = "```json"
_TAIL = " \t\r\n`"
"""What may stand behind the arguments: line breaks and the closing fence."""


class _Place(Enum):
    TEXT = auto()
    """Of the answer."""
    BETWEEN = auto()
    """In the region of calls, outside a call."""
    HEAD = auto()
    """Between the begin of a call and the separator."""
    NAME = auto()
    """V3: the line behind the separator."""
    FENCE = auto()
    """V3: before the arguments' first character."""
    ARGUMENTS = auto()


def named_call(head: str, offered: Offered) -> CallBegin | None:
    """The call of which ``head`` is the name; None: no such tool is offered."""
    name = head.strip()
    return CallBegin(name) if name in offered else None


class DeepSeekCalls:
    """A ``CallParser`` of either way."""

    def __init__(
        self,
        offered: Offered,
        *,
        names_first: bool,
        marks: CallMarks = DEEPSEEK_MARKS,
        call_of: Callable[[str, Offered], CallBegin | None] = named_call,
    ) -> None:
        """For one choice.

        Args:
            offered: the tools.
            names_first: the name stands before the separator, as in V3.1.
            marks: those of the model.
            call_of: what the text in a name's place says.
        """
        self._offered = offered
        self._names_first = names_first
        self._marks = marks
        self._call_of = call_of
        self._place = _Place.TEXT
        self._raw = ""
        """What the client has to be given if this is no call."""
        self._part = ""
        """Of the head, the name, the fence; or what may be the tail of the arguments."""
        self._arguments: list[str] = []
        """Of the open call, in pieces."""
        self._has_called = False
        """In this region."""

    def feed(self, item: Item) -> Iterator[CallEvent]:
        """What is sure now."""
        if isinstance(item, Mark):
            yield from self._mark(item)
        elif self._place is _Place.TEXT:
            yield Content(item)
        elif self._place is _Place.ARGUMENTS:
            yield from self._add_arguments(item)
        else:
            yield from self._text(item)

    def flush(self) -> Iterator[CallEvent]:
        """What was held back, at the end of the output."""
        if self._place in (_Place.HEAD, _Place.NAME, _Place.BETWEEN):
            yield from self._give_back("")
        elif (
            self._place is _Place.ARGUMENTS
            and self._part
            and not _is_json("".join(self._arguments))
        ):
            yield Arguments(self._part)

    def _mark(self, mark: Mark) -> Iterator[CallEvent]:
        place, text, marks = self._place, mark.text, self._marks
        if place is _Place.NAME and text in (marks.call_end, marks.calls_end, marks.call_begin):
            yield from self._begin_call(self._part)
            place = self._place
        if place is _Place.TEXT and text == marks.calls_begin:
            self._has_called = False
            self._go(_Place.BETWEEN, text)
        elif place in (_Place.TEXT, _Place.BETWEEN) and text == marks.call_begin:
            self._has_called &= place is _Place.BETWEEN
            self._go(_Place.HEAD, self._raw + text)
        elif place is _Place.BETWEEN and text == marks.calls_end and self._has_called:
            self._go(_Place.TEXT)
        elif place is _Place.HEAD and text == marks.separator:
            self._raw += text
            yield from self._separate()
        elif place in (_Place.FENCE, _Place.ARGUMENTS):
            yield from self._mark_in_call(text)
        else:
            yield from self._give_back(text)

    def _mark_in_call(self, text: str) -> Iterator[CallEvent]:
        marks = self._marks
        if text not in (marks.call_end, marks.calls_end, marks.call_begin):
            yield from self._add_arguments(text)
            return
        if not self._arguments:
            yield Arguments(NO_ARGUMENTS)
        yield CallEnd()
        if text == marks.call_begin:
            self._go(_Place.HEAD, text)
        else:
            self._go(_Place.BETWEEN if text == marks.call_end else _Place.TEXT)

    def _text(self, text: str) -> Iterator[CallEvent]:
        """Text before the arguments."""
        if self._place is not _Place.FENCE:
            self._raw += text
        if self._place is _Place.BETWEEN:
            if not text.isspace():
                yield from self._give_back("")
            return
        self._part += text
        if self._place is _Place.NAME:
            name, line_break, rest = self._part.partition("\n")
            if line_break:
                yield from self._begin_call(name, rest)
        elif self._place is _Place.FENCE:
            yield from self._skip_fence()

    def _separate(self) -> Iterator[CallEvent]:
        if self._names_first:
            yield from self._begin_call(self._part)
        elif self._part.strip() == "function":
            self._place, self._part = _Place.NAME, ""
        else:
            yield from self._give_back("")

    def _begin_call(self, name: str, rest: str = "") -> Iterator[CallEvent]:
        call = self._call_of(name, self._offered)
        if call is None:
            yield from self._give_back("")
            return
        self._has_called = True
        self._go(_Place.FENCE)
        self._part, self._arguments = rest, []
        yield call
        yield from self._skip_fence()

    def _skip_fence(self) -> Iterator[CallEvent]:
        rest = self._part.lstrip()
        if _FENCE.startswith(rest):
            return
        if rest.startswith(_FENCE):
            rest = rest.removeprefix(_FENCE).lstrip()
        elif rest.startswith("```"):
            rest = rest.removeprefix("```").lstrip()
        if rest:
            self._place, self._part = _Place.ARGUMENTS, ""
            yield from self._add_arguments(rest)

    def _add_arguments(self, text: str) -> Iterator[CallEvent]:
        self._place = _Place.ARGUMENTS
        text = self._part + text
        body = text.rstrip(_TAIL)
        self._part = text[len(body) :]
        if body:
            self._arguments.append(body)
            yield Arguments(body)

    def _go(self, place: _Place, raw: str = "") -> None:
        self._place, self._raw, self._part = place, raw, ""

    def _give_back(self, text: str) -> Iterator[CallEvent]:
        """Say that there is no call."""
        raw = self._raw + text
        is_space = not raw.strip() and self._has_called
        self._go(_Place.TEXT)
        if raw and not is_space:
            yield Content(raw)


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
