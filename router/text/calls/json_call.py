"""A call as one JSON object with a name and arguments: Hermes and Qwen within marks, Llama without.

Hermes::

    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

Llama 3: ``{"name": "f", "parameters": {"x": 1}}`` from the answer's first character on, further
calls behind semicolons.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

import orjson

from router.text.calls.events import (
    NO_ARGUMENTS,
    Arguments,
    CallBegin,
    CallEnd,
    CallEvent,
    Content,
    Offered,
    StrayText,
)
from router.text.calls.json_object import (
    SPACE,
    Broken,
    Field,
    FieldEnd,
    ObjectEnd,
    ObjectReader,
    Value,
)
from router.text.marks import Item, Mark, text_of

HERMES_MARKS = ("<tool_call>", "</tool_call>")
LLAMA_MARKS = ("<|python_tag|>",)
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)


class Status(Enum):
    """How much is known of an object."""

    UNSURE = auto()
    """It may yet turn out to be no call."""
    SURE = auto()
    WHOLE = auto()
    """It is a call, and over."""
    NO_CALL = auto()


class JsonCall:
    """Reads one object as a call. Nothing is said of it before it is sure to be one."""

    __slots__ = (
        "_arguments",
        "_field",
        "_is_marked",
        "_name",
        "_offered",
        "_reader",
        "rest",
        "status",
    )

    def __init__(self, offered: Offered, *, is_marked: bool) -> None:
        """``is_marked``: it stands within marks; without them an object may be any JSON answer."""
        self._offered = offered
        self._is_marked = is_marked
        self._reader = ObjectReader()
        self._field = ""
        self._name: str | None = None
        """As it is written, until it is whole."""
        self._arguments: str | None = None
        """Held back until the name is known."""
        self.status = Status.UNSURE
        self.rest = ""
        """What follows the object."""

    def feed(self, text: str) -> Iterator[CallEvent]:
        """Add ``text``; not once the object is over or no call."""
        for event in self._reader.feed(text):
            match event:
                case Field(name):
                    self._begin_field(name)
                case Value(piece):
                    yield from self._add(piece)
                case FieldEnd():
                    yield from self._end_field()
                case ObjectEnd(rest) | Broken(rest):
                    yield from self._end(rest, is_broken=isinstance(event, Broken))
            if self.status is Status.NO_CALL:
                return

    def flush(self) -> Iterator[CallEvent]:
        """What is held back of the arguments, where the text ends in them."""
        held = self._reader.flush()
        if held and self.status is Status.SURE and self._field in _ARGUMENTS:
            yield Arguments(held)

    def _begin_field(self, name: str) -> None:
        is_again = name == "name" and self._name is not None
        is_again |= name in _ARGUMENTS and self._arguments is not None
        self._field = "" if is_again else name
        if self.status is Status.UNSURE and not self._is_marked and name not in _KEYS:
            self.status = Status.NO_CALL

    def _add(self, piece: str) -> Iterator[CallEvent]:
        if self._field == "name":
            self._name = (self._name or "") + piece
        elif self.status is Status.SURE and self._field in _ARGUMENTS:
            yield Arguments(piece)
        elif self._field in _ARGUMENTS:
            is_first = self._arguments is None
            self._arguments = (self._arguments or "") + piece
            if is_first and not self._is_marked and not piece.startswith("{"):
                self.status = Status.NO_CALL
            elif self._name is not None:
                yield from self._begin_call()

    def _end_field(self) -> Iterator[CallEvent]:
        if self._field != "name":
            return
        try:
            self._name = orjson.loads(self._name or "")
        except orjson.JSONDecodeError:
            self._name = None
        if not isinstance(self._name, str) or self._name not in self._offered:
            self.status = Status.NO_CALL
        elif self._arguments is not None:
            yield from self._begin_call()

    def _begin_call(self) -> Iterator[CallEvent]:
        assert self._name is not None
        self.status = Status.SURE
        yield CallBegin(self._name)
        yield Arguments(self._arguments or NO_ARGUMENTS)

    def _end(self, rest: str, *, is_broken: bool) -> Iterator[CallEvent]:
        if self.status is Status.UNSURE:
            if self._name is None or is_broken or not self._is_marked:
                self.status = Status.NO_CALL
                return
            yield from self._begin_call()
        self.status, self.rest = Status.WHOLE, rest
        yield CallEnd()


class _Place(Enum):
    TEXT = auto()
    """Of the answer."""
    CALL = auto()
    BEHIND = auto()
    """A call, where only its closing mark, or the next call, is missing."""


class HermesCalls:
    """A ``CallParser`` of objects within marks."""

    def __init__(self, offered: Offered) -> None:
        """For one choice."""
        self._offered = offered
        self._place = _Place.TEXT
        self._call = JsonCall(offered, is_marked=True)
        self._raw = ""
        """What the client has to be given if this is no call."""
        self._stray = StrayText()

    def feed(self, item: Item) -> Iterator[CallEvent]:
        """What is sure now."""
        opening, closing = HERMES_MARKS
        if item == Mark(opening):
            yield from self._leave()
            self._place, self._raw = _Place.CALL, opening
            self._call = JsonCall(self._offered, is_marked=True)
        elif item == Mark(closing) and self._place is not _Place.TEXT:
            if self._place is _Place.CALL:
                self._raw += closing
                yield from self._leave()
            self._place = _Place.TEXT
        elif self._place is _Place.CALL:
            yield from self._add(text_of(item))
        elif self._place is _Place.TEXT:
            yield Content(text_of(item))
        else:
            yield from self._stray.feed(text_of(item))

    def flush(self) -> Iterator[CallEvent]:
        """What was held back, at the end of the output."""
        if self._place is _Place.CALL:
            yield from self._call.flush()
            if self._call.status is Status.UNSURE:
                yield Content(self._raw)

    def _add(self, text: str) -> Iterator[CallEvent]:
        if self._call.status is Status.UNSURE:
            self._raw += text
        yield from self._call.feed(text)
        if self._call.status is Status.NO_CALL:
            self._place = _Place.TEXT
            yield Content(self._raw)
        elif self._call.status is Status.WHOLE:
            self._place, self._stray = _Place.BEHIND, StrayText()
            yield from self._stray.feed(self._call.rest)

    def _leave(self) -> Iterator[CallEvent]:
        """End a call whose object is not over."""
        if self._place is _Place.CALL:
            yield from self._call.flush()
            yield CallEnd() if self._call.status is Status.SURE else Content(self._raw)


class LlamaCalls:
    """A ``CallParser`` of objects that are the whole answer."""

    def __init__(self, offered: Offered) -> None:
        """For one choice."""
        self._offered = offered
        self._place = _Place.BEHIND
        """Where a call may begin; so does the answer."""
        self._call = JsonCall(offered, is_marked=False)
        self._raw = ""
        self._has_called = False

    def feed(self, item: Item) -> Iterator[CallEvent]:
        """What is sure now."""
        text = text_of(item)
        if self._place is _Place.BEHIND:
            if isinstance(item, Mark) and not self._raw.strip():
                self._raw += text
                return
            yield from self._look(text)
        elif self._place is _Place.CALL:
            yield from self._add(text)
        else:
            yield Content(text)

    def flush(self) -> Iterator[CallEvent]:
        """What was held back, at the end of the output."""
        if self._place is _Place.CALL:
            yield from self._call.flush()
        if self._raw.strip() or not self._has_called:
            yield Content(self._raw)

    def _look(self, text: str) -> Iterator[CallEvent]:
        """Find the next object's brace behind white space, the mark and semicolons."""
        for position, char in enumerate(text):
            if char == "{":
                self._place = _Place.CALL
                self._raw += text[:position]
                self._call = JsonCall(self._offered, is_marked=False)
                yield from self._add(text[position:])
                return
            if char not in SPACE and char != ";":
                self._place, raw = _Place.TEXT, self._raw
                self._raw = ""
                yield Content(raw + text)
                return
        self._raw += text

    def _add(self, text: str) -> Iterator[CallEvent]:
        if self._call.status is Status.UNSURE:
            self._raw += text
        for event in self._call.feed(text):
            self._raw, self._has_called = "", True
            yield event
        if self._call.status is Status.NO_CALL:
            self._place, raw = _Place.TEXT, self._raw
            self._raw = ""
            yield Content(raw)
        elif self._call.status is Status.WHOLE:
            self._place = _Place.BEHIND
            yield from self._look(self._call.rest)
