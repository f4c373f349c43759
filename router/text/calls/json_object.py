"""One JSON object as it comes: its fields' names, and their values as they are written. Pure.

Values are not decoded: they go on as text. Only the structure of the object itself is judged, not
that of its values.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple

import orjson

SPACE = " \t\r\n"


class Field(NamedTuple):
    """The value of a field begins."""

    name: str


class Value(NamedTuple):
    """A piece of the latest field's value."""

    text: str


class FieldEnd(NamedTuple):
    """The value of the latest field is whole."""


class ObjectEnd(NamedTuple):
    """The object is whole; ``rest`` follows it."""

    rest: str


class Broken(NamedTuple):
    """No JSON object; ``rest`` begins where that shows."""

    rest: str


ObjectEvent = Field | Value | FieldEnd | ObjectEnd | Broken


class _State(Enum):
    START = auto()
    KEY = auto()
    """Before a name, or the end."""
    NAME = auto()
    COLON = auto()
    VALUE = auto()
    """Before a value."""
    END = auto()


class ObjectReader:
    """Reads one object. Not to be fed after ``ObjectEnd`` or ``Broken``."""

    __slots__ = (
        "_depth",
        "_escaped",
        "_in_string",
        "_is_inside",
        "_name",
        "_needs_key",
        "_state",
        "_value",
    )

    def __init__(self) -> None:
        """At the opening brace, or white space before it."""
        self._state = _State.START
        self._name = ""
        self._needs_key = False
        self._value = ""
        """White space at the end of a value so far: part of it if more follows."""
        self._is_inside = False
        """In a value; the state is that behind it."""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> Iterator[ObjectEvent]:
        """What ``text`` adds."""
        position = 0
        while position < len(text):
            if self._is_inside:
                end = self._end_of_value(text, position)
                yield from self._add_value(text[position:end])
                if end == len(text):
                    return
                yield FieldEnd()
                self._value, self._is_inside, self._needs_key = "", False, text[end] == ","
                position = end + self._needs_key
                continue
            if not self._step(text[position]):
                yield Broken(text[position:])
                return
            if self._is_inside:  # and its first character is yet to be read
                yield Field(self._name)
                continue
            position += 1
            if self._state is _State.END:
                yield ObjectEnd(text[position:])
                return

    def flush(self) -> str:
        """What is held back of a value, where the text ends in it."""
        held, self._value = self._value, ""
        return held if self._is_inside else ""

    def _step(self, char: str) -> bool:
        """Take one character outside values; the first of a value is left where it is.

        Returns whether it may stand there.
        """
        state = self._state
        if state is _State.NAME:
            return self._add_to_name(char)
        if char in SPACE:
            return True
        if state is _State.START and char == "{":
            self._state = _State.KEY
        elif state is _State.KEY and char == '"':
            self._state, self._name = _State.NAME, char
        elif state is _State.KEY and char == "}" and not self._needs_key:
            self._state = _State.END
        elif state is _State.COLON and char == ":":
            self._state = _State.VALUE
        elif state is _State.VALUE and char not in ",}]:":
            self._state, self._is_inside = _State.KEY, True
        else:
            return False
        return True

    def _add_to_name(self, char: str) -> bool:
        self._name += char
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            try:
                self._name = orjson.loads(self._name)
            except orjson.JSONDecodeError:
                return False
            self._state, self._needs_key = _State.COLON, False
        return True

    def _end_of_value(self, text: str, position: int) -> int:
        """Where the comma or brace behind the value stands; the end of ``text`` if nowhere."""
        for index in range(position, len(text)):
            char = text[index]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif self._depth == 0 and char in ",}":
                return index
            elif char in "}]":
                self._depth = max(0, self._depth - 1)
        return len(text)

    def _add_value(self, text: str) -> Iterator[Value]:
        whole = self._value + text
        body = whole.rstrip(SPACE)
        self._value = whole[len(body) :]
        if body:
            yield Value(body)
