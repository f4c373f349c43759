"""Patterns of JSON Schema as patterns of what stands between the quotation marks. Pure.

The library takes a pattern for the written form of a string: a quotation mark, a backslash or a
control character in it would be written as it is, and the document would be no JSON. They are left
out of classes here, and refused by themselves. A pattern is taken for the whole string, which is a
narrower reading than that of JSON Schema: what is written fits either.
"""

from __future__ import annotations

import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
from typing import Any

_UNSAFE = frozenset([*map(chr, range(0x20)), '"', "\\"])
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
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
_Ranges = list[tuple[int, int]]


def escaped_pattern(pattern: str) -> str:
    """``pattern`` for the written form of a string.

    Raises:
        ValueError: it is no pattern, or one that no grammar can follow.
    """
    try:
        # ECMA's patterns know letters and digits of ASCII alone.
        parsed = sre_parser.parse(pattern, re.ASCII)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is no regular expression: {error}") from error
    if parsed.state.flags & ~(re.ASCII | sre.SRE_FLAG_UNICODE):
        raise ValueError("has flags, which no grammar can follow")
    return f"^{_sequence(list(parsed), is_outer=True)}$"


def _sequence(items: list[tuple[Any, Any]], *, is_outer: bool) -> str:
    """``is_outer``: nothing stands before or behind, so anchors change nothing at the ends."""
    parts = []
    for index, (kind, value) in enumerate(items):
        if kind is sre.AT:
            is_begin = value in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING) and index == 0
            is_end = value in (sre.AT_END, sre.AT_END_STRING) and index == len(items) - 1
            if not is_outer or not (is_begin or is_end):
                raise ValueError("has an anchor or a word boundary in the middle")
            continue
        parts.append(_item(kind, value, is_outer=is_outer and len(items) == 1))
    return "".join(parts)


def _item(kind: Any, value: Any, *, is_outer: bool) -> str:
    if kind is sre.LITERAL:
        return _char(value)
    if kind is sre.NOT_LITERAL:
        return _class(_inverted([(value, value)]))
    if kind is sre.ANY:
        return _class(_inverted([(0x0A, 0x0A)]))
    if kind is sre.IN:
        return _class(_ranges(value))
    if kind is sre.BRANCH:
        return f"({'|'.join(_sequence(list(b), is_outer=is_outer) for b in value[1])})"
    if kind is sre.SUBPATTERN and not (value[1] or value[2]):
        return f"({_sequence(list(value[-1]), is_outer=is_outer)})"
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        least, most, repeated = value
        bound = "" if most is sre.MAXREPEAT else str(int(most))
        return f"({_sequence(list(repeated), is_outer=False)}){{{least},{bound}}}"
    raise ValueError(f"has {str(kind).lower().replace('_', ' ')}, which no grammar can follow")


def _ranges(items: list[tuple[Any, Any]]) -> _Ranges:
    """The code points of a class."""
    ranges: _Ranges = []
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
            ranges += _inverted(list(_CLASSES[_NEGATED[value]]))
    return _inverted(ranges) if is_negated else ranges


def _inverted(ranges: _Ranges) -> _Ranges:
    result, begin = [], 0
    for first, last in sorted(ranges):
        if first > begin:
            result.append((begin, first - 1))
        begin = max(begin, last + 1)
    if begin <= _LAST:
        result.append((begin, _LAST))
    return result


def _class(ranges: _Ranges) -> str:
    """One of the code points, but for those that strings of JSON have only as escapes."""
    safe = _inverted([(ord(char), ord(char)) for char in _UNSAFE] + [_SURROGATES])
    spans = [
        (max(a, first), min(b, last))
        for a, b in ranges
        for first, last in safe
        if max(a, first) <= min(b, last)
    ]
    if not spans:
        raise ValueError("has a class of which JSON writes every character as an escape")
    return f"[{''.join(_code(a) if a == b else f'{_code(a)}-{_code(b)}' for a, b in spans)}]"


def _char(code: int) -> str:
    if chr(code) in _UNSAFE or _SURROGATES[0] <= code <= _SURROGATES[1]:
        raise ValueError(f"has {chr(code)!r}, which JSON writes as an escape")
    return _code(code)


def _code(code: int) -> str:
    char = chr(code)
    if char.isalnum() and code < 0x80:
        return char
    return f"\\u{{{code:X}}}" if code > 0xFFFF else f"\\u{code:04X}"
