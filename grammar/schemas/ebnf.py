"""Rules of a grammar while they are put together, and their text. Pure.

A symbol is a text: a literal, a class of characters, or the name of a rule. A rule has
alternatives, each a sequence of symbols; one without any derives nothing, and what needs it goes
with it.

Repeats are rules here, and not the library's ``{m,n}``: that one writes out 128 copies twice, which
takes seconds to compile. n times is twice n/2 times, so any bound takes a few dozen rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Symbols = tuple[str, ...]
"""Symbols one behind the other."""
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_IN_CLASS = frozenset("\\]^-[\"'")
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
Ranges = list[tuple[int, int]]
"""Code points, from the first to the last of each."""


def literal(text: str) -> str:
    """The symbol of ``text`` itself."""
    return f'"{"".join(_ESCAPES.get(char) or _plain(char) for char in text)}"'


def one_char(ranges: Ranges, *, is_negated: bool = False) -> str:
    """The symbol of one character of ``ranges``, or of any other one."""
    spans = "".join(_code(a) if a == b else f"{_code(a)}-{_code(b)}" for a, b in ranges)
    return f"[{'^' if is_negated else ''}{spans}]"


def one_of(chars: str) -> str:
    """The symbol of one of ``chars``."""
    return one_char([(ord(char), ord(char)) for char in chars])


def inverted(ranges: Ranges) -> Ranges:
    """All other code points."""
    result, begin = [], 0
    for first, last in sorted(ranges):
        if first > begin:
            result.append((begin, first - 1))
        begin = max(begin, last + 1)
    if begin <= _LAST:
        result.append((begin, _LAST))
    return result


def intersection(these: Ranges, those: Ranges) -> Ranges:
    """The code points of both."""
    return [
        (max(a, first), min(b, last))
        for a, b in these
        for first, last in those
        if max(a, first) <= min(b, last)
    ]


def is_surrogate(code: int) -> bool:
    """Whether a code point is half of a pair, and no character."""
    return _SURROGATES[0] <= code <= _SURROGATES[1]


def _plain(char: str) -> str:
    return char if ord(char) >= 0x20 and ord(char) != 0x7F else f"\\x{ord(char):02x}"


def _code(code: int) -> str:
    char = chr(code)
    if code < 0x80 and char.isprintable():
        return f"\\{char}" if char in _IN_CLASS else char
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"


class Rules:
    """Of one grammar."""

    def __init__(self) -> None:
        self._bodies: dict[str, list[Symbols]] = {}
        self._before: dict[str, Symbols] = {}
        self._names: dict[tuple[Symbols, ...], str] = {}
        self._counts: dict[tuple[str, int], str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._bodies

    def define(
        self, name: str, alternatives: Iterable[Sequence[str]], *, before: Symbols = ()
    ) -> str:
        """Give the rule ``name`` its alternatives; ``before``: what follows wherever it stands."""
        self._bodies[name] = [tuple(filter(None, each)) for each in alternatives]
        if before:
            self._before[name] = before
        return name

    def any_of(self, alternatives: Iterable[Sequence[str]]) -> str:
        """A symbol of one of several sequences."""
        key = tuple(dict.fromkeys(tuple(filter(None, each)) for each in alternatives))
        if len(key) == 1 and len(key[0]) == 1:
            return key[0][0]
        if key not in self._names:
            self._names[key] = self.define(f"r{len(self._names)}", key)
        return self._names[key]

    def never(self) -> str:
        """A symbol of nothing at all."""
        return self.any_of(())

    def repeated(self, unit: str, least: int, most: int | None) -> str:
        """A symbol of ``unit`` from ``least`` to ``most`` times; None: any number of them."""
        more = self._any_number(unit) if most is None else self._up_to(unit, most - least)
        return self.any_of([(self.times(unit, least), more)])

    def times(self, unit: str, number: int) -> str:
        """A symbol of ``unit`` so many times; "": none of them."""
        powers = []
        power = unit
        while number:
            if number % 2:
                powers.append(power)
            number //= 2
            power = self.any_of([(power, power)]) if number else power
        return self.any_of([powers]) if powers else ""

    def _any_number(self, unit: str) -> str:
        name = f"{self.any_of([(unit,), ()])}_more"
        if name not in self:
            self.define(name, [(), (unit, name)])
        return name

    def _up_to(self, unit: str, most: int) -> str:
        """Fewer than a power of two, or so many first: log(most) ways at once, and not most."""
        if most == 0:
            return ""
        if most == 1:
            return self.any_of([(), (unit,)])
        if (unit, most) not in self._counts:
            half = 1 << (most.bit_length() - 1)
            fewer, rest = self._up_to(unit, half - 1), self._up_to(unit, most - half)
            found = self.any_of([(fewer,), (self.times(unit, half), rest)])
            self._counts[unit, most] = found
        return self._counts[unit, most]

    def text(self, root: str) -> str | None:
        """The grammar in EBNF with the symbol ``root`` as its root; None: it derives nothing."""
        self.define("root", [(root,)])
        ending = self._productive()
        if "root" not in ending:
            return None
        lines, waiting, seen = [], ["root"], {"root"}
        while waiting:
            name = waiting.pop()
            kept = [each for each in self._bodies[name] if self._ends(each, ending)]
            body = " | ".join(" ".join(each) or '""' for each in kept)
            before = self._before.get(name, ())
            lines.append(f"{name} ::= {body}" + (f" (= {' '.join(before)})" if before else ""))
            for symbol in [symbol for each in [*kept, before] for symbol in each]:
                if symbol in self._bodies and symbol not in seen:
                    seen.add(symbol)
                    waiting.append(symbol)
        return "\n".join(lines)

    def _productive(self) -> set[str]:
        """The rules that derive a text: the least fixed point."""
        users: dict[str, set[str]] = {}
        for name, body in self._bodies.items():
            for symbol in {symbol for each in body for symbol in each}:
                users.setdefault(symbol, set()).add(name)
        ending: set[str] = set()
        waiting = list(self._bodies)
        while waiting:
            name = waiting.pop()
            if name in ending or not any(self._ends(e, ending) for e in self._bodies[name]):
                continue
            ending.add(name)
            waiting += users.get(name, ())
        return ending

    def _ends(self, sequence: Symbols, ending: set[str]) -> bool:
        return all(symbol in ending or symbol not in self._bodies for symbol in sequence)
