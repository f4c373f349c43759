"""Calls as GLM-4.5 writes them: a name, then keys and values, each within marks of its own.

::

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

The client gets JSON: a value is a string where the tool's schema says so, else what it is as JSON,
and a string where it is no JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

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
from router.text.calls.values import is_text, json_string, json_value, types_of
from router.text.marks import Item, Mark

OPENING, CLOSING = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
GLM_MARKS = (OPENING, CLOSING, KEY, KEY_END, VALUE, VALUE_END)


class _Place(Enum):
    TEXT = auto()
    """Of the answer."""
    NAME = auto()
    BETWEEN = auto()
    """In a call, outside a key or value."""
    KEY = auto()
    VALUE = auto()


class GlmCalls:
    """A ``CallParser``."""

    def __init__(self, offered: Offered) -> None:
        """For one choice."""
        self._offered = offered
        self._place = _Place.TEXT
        self._raw = ""
        """What the client has to be given if this is no call."""
        self._name = ""
        self._part = ""
        """Of the name, the key, or a value that is not yet known to be a string."""
        self._key: str | None = None
        """That the next value belongs to."""
        self._num_fields = 0
        self._types: set[str] = set()
        """Of the value, as far as the schema says."""
        self._stray = StrayText()
        self._streams_value = False

    def feed(self, item: Item) -> Iterator[CallEvent]:
        """What is sure now."""
        if isinstance(item, Mark):
            self._stray = StrayText()
            yield from self._mark(item.text)
        else:
            yield from self._text(item)

    def flush(self) -> Iterator[CallEvent]:
        """What was held back, at the end of the output."""
        if self._place is _Place.NAME:
            yield Content(self._raw)
        elif self._place is _Place.KEY:
            yield Arguments(self._separator() + json_string(self._part)[:-1])
        elif self._place is _Place.VALUE and not self._streams_value:
            yield Arguments(self._part)

    def _mark(self, mark: str) -> Iterator[CallEvent]:
        place = self._place
        if place is _Place.TEXT:
            if mark == OPENING:
                self._place, self._raw, self._part = _Place.NAME, mark, ""
            else:
                yield Content(mark)
        elif place is _Place.NAME:
            self._raw += mark
            yield from self._end_name(mark)
        elif place is _Place.KEY and mark == KEY_END:
            self._key, self._place = self._part, _Place.BETWEEN
        elif place is _Place.VALUE and mark == VALUE_END:
            yield from self._end_value()
        elif place is _Place.BETWEEN and mark == KEY:
            yield from self._end_key()
            self._place, self._part = _Place.KEY, ""
        elif place is _Place.BETWEEN and mark == VALUE and self._key is not None:
            yield from self._begin_value()
        elif mark == CLOSING:
            yield from self._end_call()
        elif mark == OPENING:
            yield from self._end_call()
            self._place, self._raw, self._part = _Place.NAME, mark, ""
        else:
            yield from self._text(mark)

    def _text(self, text: str) -> Iterator[CallEvent]:
        if self._place is _Place.TEXT:
            yield Content(text)
        elif self._place is _Place.NAME:
            self._raw += text
            self._part += text
            # The name's line may be over before its first key is there.
            name, line_break, rest = self._part.lstrip().partition("\n")
            if line_break:
                yield from self._begin_call(name, rest)
        elif self._place is _Place.KEY or (self._place is _Place.VALUE and not self._streams_value):
            self._part += text
        elif self._place is _Place.VALUE:
            yield Arguments(json_string(text)[1:-1])
        else:
            yield from self._stray.feed(text)

    def _end_name(self, mark: str) -> Iterator[CallEvent]:
        """The name is over where its line is not, at ``mark``, which is in the raw text already."""
        if mark in (KEY, CLOSING):
            yield from self._begin_call(self._part, Mark(mark))
        else:
            yield from self._give_back()

    def _begin_call(self, name: str, rest: Item) -> Iterator[CallEvent]:
        name = name.strip()
        if name not in self._offered:
            yield from self._give_back()
            return
        self._place, self._name, self._key, self._num_fields = _Place.BETWEEN, name, None, 0
        yield CallBegin(name)
        if rest:
            yield from self.feed(rest)

    def _give_back(self) -> Iterator[CallEvent]:
        """Say that there is no call."""
        self._place = _Place.TEXT
        yield Content(self._raw)

    def _separator(self) -> str:
        return ", " if self._num_fields else "{"

    def _begin_value(self) -> Iterator[CallEvent]:
        schema, key = self._offered[self._name], self._key or ""
        self._place, self._part, self._types = _Place.VALUE, "", types_of(schema, key)
        self._streams_value = is_text(schema, key)
        yield from self._write_key('"' if self._streams_value else "")

    def _write_key(self, value: str) -> Iterator[CallEvent]:
        yield Arguments(f"{self._separator()}{json_string(self._key or '')}: {value}")
        self._num_fields += 1
        self._key = None

    def _end_key(self) -> Iterator[CallEvent]:
        """A key that has no value is told all the same."""
        if self._key is not None:
            yield from self._write_key("null")

    def _end_value(self) -> Iterator[CallEvent]:
        self._place = _Place.BETWEEN
        yield Arguments('"' if self._streams_value else json_value(self._part, self._types))

    def _end_call(self) -> Iterator[CallEvent]:
        if self._place is _Place.VALUE:  # its end is missing
            yield from self._end_value()
        elif self._place is _Place.KEY:
            self._key = self._part
        yield from self._end_key()
        self._place = _Place.TEXT
        yield Arguments("}" if self._num_fields else NO_ARGUMENTS)
        yield CallEnd()
