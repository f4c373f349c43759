"""Patterns of JSON Schema as rules of what stands between the quotation marks. Pure.

A character that JSON writes as an escape is one here, too. A pattern is taken for the whole string,
which is a narrower reading than that of JSON Schema: what is written fits either.
"""

from __future__ import annotations

import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
from typing import Any

from grammar.schemas.ebnf import Ranges, Rules, Symbols, inverted
from grammar.schemas.plain_pattern import plain
from grammar.schemas.runs import Element, Ending, Runs, element_of

MAX_BYTES = 4096
MAX_LEVELS = 64
"""Of groups and repeats, one in another."""
_CLASSES: dict[Any, tuple[tuple[int, int], ...]] = {
    sre.CATEGORY_DIGIT: ((0x30, 0x39),),
    sre.CATEGORY_WORD: ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    sre.CATEGORY_SPACE: ((0x09, 0x0D), (0x20, 0x20)),
}
_NEGATED = {
    sre.CATEGORY_NOT_DIGIT: sre.CATEGORY_DIGIT,
    sre.CATEGORY_NOT_WORD: sre.CATEGORY_WORD,
    sre.CATEGORY_NOT_SPACE: sre.CATEGORY_SPACE,
}
_LINE_ENDS = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_NAMED_GROUP = re.compile(r"(?<!\\)((?:\\\\)*)\(\?<(?=[A-Za-z_$])")
"""As ECMA spells it, where Python has a P more."""
_END = Ending(name="p")
_Items = list[tuple[Any, Any]]


def parsed(pattern: str) -> _Items:
    """The parts of ``pattern``.

    Raises:
        ValueError: it is no pattern, or too large.
    """
    if len(pattern.encode(errors="replace")) > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES} bytes")
    try:
        # ECMA's patterns know letters and digits of ASCII alone.
        found = sre_parser.parse(_NAMED_GROUP.sub(r"\1(?P<", plain(pattern)), re.ASCII)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is no regular expression: {error}") from error
    if found.state.flags & ~(re.ASCII | sre.SRE_FLAG_UNICODE):
        raise ValueError("has flags, which no grammar can follow")
    return list(found)


def check_pattern(pattern: str) -> None:
    """Raise ValueError where ``pattern`` is none, or one that no grammar can follow."""
    Pattern(Rules()).symbol(pattern)


class Pattern:
    """Makes rules of patterns, for one grammar."""

    def __init__(self, rules: Rules) -> None:
        self._rules, self._runs = rules, Runs(rules)

    def symbol(self, pattern: str) -> str:
        """What ``pattern`` takes as a whole, as a string of JSON has it.

        Raises:
            ValueError: it is no pattern, or one that no grammar can follow.
        """
        return self._rules.any_of([self._sequence(parsed(pattern), 0, is_outer=True)])

    def _sequence(self, items: _Items, level: int, *, is_outer: bool) -> Symbols:
        """``is_outer``: nothing stands before or behind, so anchors change nothing at the ends."""
        if level > MAX_LEVELS:
            raise ValueError(f"is nested deeper than {MAX_LEVELS} levels")
        parts = []
        for index, (kind, value) in enumerate(items):
            if kind is sre.AT:
                is_begin = value in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING) and index == 0
                is_end = value in (sre.AT_END, sre.AT_END_STRING) and index == len(items) - 1
                if not is_outer or not (is_begin or is_end):
                    raise ValueError("has an anchor or a word boundary in the middle")
                continue
            parts.append(self._item(kind, value, level, is_outer=is_outer and len(items) == 1))
        return tuple(parts)

    def _item(self, kind: Any, value: Any, level: int, *, is_outer: bool) -> str:
        rules = self._rules
        element = _element(kind, value)
        if element is not None:
            return rules.any_of(element.before(""))
        if kind is sre.BRANCH:
            return rules.any_of(
                self._sequence(list(each), level + 1, is_outer=is_outer) for each in value[1]
            )
        if kind is sre.SUBPATTERN and not (value[1] or value[2]):
            return rules.any_of([self._sequence(list(value[-1]), level + 1, is_outer=is_outer)])
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, repeated = value[0], value[1], list(value[2])
            most = None if most is sre.MAXREPEAT else int(most)
            element = _element(*repeated[0]) if len(repeated) == 1 else None
            if element is not None:
                return self._runs.run(element, _END, least, most)
            unit = rules.any_of([self._sequence(repeated, level + 1, is_outer=False)])
            return rules.repeated(unit, least, most)
        raise ValueError(f"has {str(kind).lower().replace('_', ' ')}, which no grammar can follow")


def _element(kind: Any, value: Any) -> Element | None:
    """What takes one character; None: it is something else."""
    if kind is sre.LITERAL:
        return element_of([(value, value)])
    if kind is sre.NOT_LITERAL:
        return element_of(inverted([(value, value)]))
    if kind is sre.ANY:
        return element_of(inverted(_LINE_ENDS))
    return element_of(_ranges(value)) if kind is sre.IN else None


def _ranges(items: _Items) -> Ranges:
    """The code points of a class."""
    ranges: Ranges = []
    is_negated = False
    for kind, value in items:
        if kind is sre.NEGATE:
            is_negated = True
        elif kind is sre.LITERAL:
            ranges.append((value, value))
        elif kind is sre.RANGE:
            ranges.append(value)
        elif value in _CLASSES:
            ranges += _CLASSES[value]
        else:
            ranges += inverted(list(_CLASSES[_NEGATED[value]]))
    return inverted(ranges) if is_negated else inverted(inverted(ranges))
