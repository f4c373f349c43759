"""Calls as DeepSeek-V3.2 writes them, in its markup (DSML): parameters with their kinds.

::

    <DSML function_calls>
    <DSML invoke name="NAME">
    <DSML parameter name="KEY" string="true">TEXT</DSML parameter>
    <DSML parameter name="KEY" string="false">JSON</DSML parameter>
    </DSML invoke>
    </DSML function_calls>

Where ``string`` is missing, the tool's schema says whether a value is a string. A value ends at the
parameter's end and nowhere else: a text may spell all the other marks.
"""

from __future__ import annotations

import re
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

DSML = "\uff5cDSML\uff5c"
CALLS, CALLS_END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
INVOKE, INVOKE_END = f"<{DSML}invoke", f"</{DSML}invoke>"
PARAMETER, PARAMETER_END = f"<{DSML}parameter", f"</{DSML}parameter>"
DSML_MARKS = (CALLS, CALLS_END, INVOKE, INVOKE_END, PARAMETER, PARAMETER_END)
MAX_HEAD = 1024
"""Characters of a tag's attributes: it is looked for their end with every token."""
# Each takes as little as it can, so that what follows changes nothing.
_NAMED = re.compile(r'\s*name="(.*?)"\s*>', re.DOTALL)
_KEYED = re.compile(r'\s*name="(.*?)"(?:\s+string="(true|false)")?\s*>', re.DOTALL)
_KEY_BEGUN = re.compile(r'\s*name="([^"]*)(?:"\s*[a-z]*=?"?[a-z]*"?\s*)?')


class _Place(Enum):
    TEXT = auto()
    """Of the answer."""
    BETWEEN = auto()
    """Within the marks around all calls, outside a call."""
    HEAD = auto()
    """Of a call: its name."""
    CALL = auto()
    """Outside its parameters."""
    KEY = auto()
    """The head of a parameter."""
    VALUE = auto()


class DsmlCalls:
    """A ``CallParser``."""

    def __init__(self, offered: Offered) -> None:
        """For one choice."""
        self._offered = offered
        self._place = _Place.TEXT
        self._raw = ""
        """What the client has to be given if this is no call."""
        self._part = ""
        """Of a head, or of a value that is no string."""
        self._name = ""
        self._types: set[str] = set()
        """Of the value, as far as the schema says, where its parameter does not."""
        self._stray = StrayText()
        self._streams_value = False
        self._num_fields = 0
        self._has_called = False
        """Within these marks around all calls."""

    def feed(self, item: Item) -> Iterator[CallEvent]:
        """What is sure now."""
        if isinstance(item, Mark):
            self._stray = StrayText()
            yield from self._mark(item.text)
        else:
            yield from self._text(item)

    def flush(self) -> Iterator[CallEvent]:
        """What was held back, at the end of the output."""
        if self._place in (_Place.BETWEEN, _Place.HEAD):
            yield from self._give_back("")
        elif self._place is _Place.KEY and (key := _begun_key(self._part)):
            yield Arguments(self._separator() + json_string(key)[:-1])
        elif self._place is _Place.VALUE and not self._streams_value:
            yield Arguments(self._part)

    def _mark(self, mark: str) -> Iterator[CallEvent]:
        place = self._place
        if place is _Place.VALUE:
            if mark == PARAMETER_END:
                yield from self._end_value()
            else:
                yield from self._text(mark)
        elif place in (_Place.CALL, _Place.KEY):
            yield from self._mark_in_call(mark)
        elif place is _Place.TEXT and mark == CALLS:
            self._has_called = False
            self._go(_Place.BETWEEN, mark)
        elif place is not _Place.HEAD and mark == INVOKE:
            self._has_called &= place is _Place.BETWEEN
            self._go(_Place.HEAD, self._raw + mark)
        elif place is _Place.BETWEEN and mark == CALLS_END and self._has_called:
            self._go(_Place.TEXT)
        else:
            yield from self._give_back(mark)

    def _mark_in_call(self, mark: str) -> Iterator[CallEvent]:
        if mark in (INVOKE_END, CALLS_END, INVOKE):
            yield from self._end_call()
            if mark == INVOKE:
                self._go(_Place.HEAD, mark)
            else:
                self._go(_Place.BETWEEN if mark == INVOKE_END else _Place.TEXT)
        elif self._place is _Place.CALL and mark == PARAMETER:
            self._place, self._part = _Place.KEY, ""
        else:
            yield from self._text(mark)

    def _text(self, text: str) -> Iterator[CallEvent]:
        place = self._place
        if place is _Place.TEXT:
            yield Content(text)
        elif place is _Place.CALL:
            yield from self._stray.feed(text)
        elif place is _Place.BETWEEN:
            self._raw += text
            if not text.isspace():
                yield from self._give_back("")
        elif place is _Place.HEAD:
            self._raw += text
            found = self._add_to_head(text, _NAMED)
            if found:
                yield from self._begin_call(found[1], self._part[found.end() :])
            elif len(self._part) >= MAX_HEAD:
                yield from self._give_back("")
        elif place is _Place.KEY:
            found = self._add_to_head(text, _KEYED)
            if found:
                yield from self._begin_value(found[1], found[2], self._part[found.end() :])
        elif place is _Place.VALUE and self._streams_value:
            yield Arguments(json_string(text)[1:-1])
        elif place is _Place.VALUE:
            self._part += text

    def _add_to_head(self, text: str, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The whole head, once it is; nothing is looked for in what is too long to be one."""
        may_be = len(self._part) < MAX_HEAD
        self._part += text
        return pattern.match(self._part[:MAX_HEAD]) if may_be else None

    def _begin_call(self, name: str, rest: str) -> Iterator[CallEvent]:
        if name not in self._offered:
            yield from self._give_back("")
            return
        self._has_called = True
        self._go(_Place.CALL)
        self._name, self._num_fields = name, 0
        yield CallBegin(name)
        if rest:
            yield from self._text(rest)

    def _begin_value(self, key: str, is_string: str | None, rest: str) -> Iterator[CallEvent]:
        schema = self._offered[self._name]
        self._types = set() if is_string else types_of(schema, key)
        self._streams_value = is_string == "true" or (not is_string and is_text(schema, key))
        self._place, self._part = _Place.VALUE, ""
        yield from self._write_key(key, '"' if self._streams_value else "")
        if rest:
            yield from self._text(rest)

    def _write_key(self, key: str, value: str) -> Iterator[CallEvent]:
        yield Arguments(f"{self._separator()}{json_string(key)}: {value}")
        self._num_fields += 1

    def _end_value(self) -> Iterator[CallEvent]:
        self._place = _Place.CALL
        yield Arguments('"' if self._streams_value else json_value(self._part, self._types))

    def _end_call(self) -> Iterator[CallEvent]:
        """A key that has no value is told all the same."""
        if self._place is _Place.KEY and (key := _begun_key(self._part)):
            yield from self._write_key(key, "null")
        yield Arguments("}" if self._num_fields else NO_ARGUMENTS)
        yield CallEnd()

    def _separator(self) -> str:
        return ", " if self._num_fields else "{"

    def _go(self, place: _Place, raw: str = "") -> None:
        self._place, self._raw, self._part = place, raw, ""

    def _give_back(self, text: str) -> Iterator[CallEvent]:
        """Say that there is no call."""
        raw = self._raw + text
        is_space = not raw.strip() and self._has_called
        self._go(_Place.TEXT)
        if raw and not is_space:
            yield Content(raw)


def _begun_key(head: str) -> str:
    """The key that ``head``, which is not whole, has or begins; all of it where it has none."""
    found = _KEY_BEGUN.fullmatch(head)
    if found:
        return found[1]
    return "" if 'name="'.startswith(head.strip()) else head.strip()
