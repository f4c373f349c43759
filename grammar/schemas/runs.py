r"""Runs of characters within strings of JSON, of so many of them, as rules. Pure.

A character counts once however it is written: as itself, by a short escape, by ``\uXXXX``, or by a
pair of these. JSON Schema counts code points, and so it is.

What a matcher does for a token depends on the rule that it is in: where the token ends in that
rule, the answer is known from the time of compiling, elsewhere it is found out, for 100,000 tokens,
at every step. So a count is made of two parts. Near its end each number of characters that are left
is a rule of its own. Far from it the characters are one rule, which says by its look-ahead that
``NEAR`` more may come; the count is in the rules around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from grammar.schemas.ebnf import (
    Ranges,
    Rules,
    Symbols,
    intersection,
    inverted,
    is_surrogate,
    literal,
    one_char,
    one_of,
)

NEAR = 16
"""Characters: few tokens have more, and each takes a rule that costs up to 40 ms to compile."""
BACKSLASH = literal("\\")
SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""Characters that JSON escapes with one letter."""
UNSAFE: Ranges = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]
"""Code points that strings have as escapes alone."""
_SAFE = inverted([*UNSAFE, (0xD800, 0xDFFF)])
_ASCII: Ranges = [(0x20, 0x7F)]
HEX = "[0-9a-fA-F]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """One character of some set."""

    name: str
    plain: str
    """A class of those that are written as they are; "": there are none."""
    outside: str
    """A class of ASCII's other characters; "": there are none."""
    escapes: tuple[Symbols, ...] = ()

    def before(self, symbol: str) -> list[Symbols]:
        """The alternatives of one character and then ``symbol``."""
        plain = [(self.plain, symbol)] if self.plain else []
        return [*plain, *((*each, symbol) for each in self.escapes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What ends a run of characters."""

    name: str
    symbol: str = ""
    """Part of the run; "": it ends where its characters do."""
    after: Symbols = ()
    """What stands behind; (): anything."""


def escaped(code: int) -> str:
    """A character as JSON has it between quotation marks."""
    char = chr(code)
    if char in SHORT:
        return f"\\{SHORT[char]}"
    return f"\\u{code:04x}" if code < 0x20 or is_surrogate(code) else char


def element_of(ranges: Ranges) -> Element:
    """One of the code points ``ranges``.

    Raises:
        ValueError: there are none, but for halves of pairs.
    """
    return _element_of(tuple(ranges))


@lru_cache(maxsize=256)
def _element_of(ranges: tuple[tuple[int, int], ...]) -> Element:
    plain = intersection(list(ranges), _SAFE)
    codes = [code for a, b in intersection(list(ranges), UNSAFE) for code in range(a, b + 1)]
    if not plain and not codes:
        raise ValueError("has a class of no character")
    escapes: list[Symbols] = []
    letters = "".join(SHORT[chr(code)] for code in codes if chr(code) in SHORT)
    if letters:
        escapes.append((BACKSLASH, one_of(letters)))
    for first in "01":
        others = [escaped(code) for code in codes if chr(code) not in SHORT]
        digits = "".join(each[5] for each in others if each[4] == first)
        if digits:
            escapes.append((literal(f"\\u00{first}"), one_of(digits)))
    outside = intersection(_ASCII, inverted(plain))
    name = "c" + "_".join(f"{a:x}_{b:x}" for a, b in ranges)
    return Element(
        name=name if len(name) < 40 else f"c{hash(ranges) & (1 << 60) - 1:x}",
        plain=one_char(plain) if plain else "",
        outside=one_char(outside) if outside else "",
        escapes=tuple(escapes),
    )


class Runs:
    """Of one grammar."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def run(self, element: Element, ending: Ending, least: int, most: int | None) -> str:
        """So many characters, None: any number of them, and their ending."""
        rules = self._rules
        if most is None:
            last = self._near(element, ending, 0, None)
            return rules.any_of([(self._far(element, ending, least), last)])
        far = most - NEAR
        if far <= 0:
            return self._near(element, ending, least, most)
        if least:
            sure = min(least, far)
            rest = self.run(element, ending, least - sure, most - sure)
            return rules.any_of([(self._far(element, ending, sure), rest)])
        fewer = rules.repeated(self._far(element, ending, 1), 0, far - 1)
        last = self._near(element, ending, 0, NEAR)
        return rules.any_of([(fewer, ending.symbol), (self._far(element, ending, far), last)])

    def _near(self, element: Element, ending: Ending, least: int, most: int | None) -> str:
        name = f"{element.name}{ending.name}_{least}_{'' if most is None else most}"
        if name in self._rules:
            return name
        alternatives: list[Symbols] = [] if least else [(ending.symbol,)]
        if most is None:
            alternatives += element.before(name)
        elif most:
            further = self._near(element, ending, max(0, least - 1), most - 1)
            alternatives += element.before(further)
        return self._rules.define(name, alternatives, before=ending.after)

    def _far(self, element: Element, ending: Ending, number: int) -> str:
        """So many characters, behind which at least ``NEAR`` more may come; "": none."""
        name = f"{element.name}{ending.name}_far"
        if number and name not in self._rules:
            coming = self._coming(element, ending, NEAR - 1)
            nothing = self._rules.define("nothing", [()])
            # The library believes a look-ahead of a rule that stands at one place, and not last,
            # and writes out a rule without others in it where it stands.
            char = self._rules.define(f"{name}_char", element.before(nothing), before=(coming,))
            self._rules.define(name, [(char, nothing)])
        return self._rules.times(name, number)

    def _coming(self, element: Element, ending: Ending, number: int) -> str:
        """What a token may go on with; one that gets to its end is looked at when it comes.

        So its ends are whole characters: of a part of one, nobody would look at the rest. A token
        that leaves the run for a character of several bytes comes in two.
        """
        name = f"{element.name}{ending.name}_coming_{number}"
        if name in self._rules:
            return name
        end, further = ending.symbol or element.outside, ""
        if number:
            further = self._coming(element, ending, number - 1)
        else:
            end = one_char(_ASCII)
        alternatives = [*element.before(further), *([(end,)] if end else [])]
        return self._rules.define(name, alternatives)
