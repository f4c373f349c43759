"""Strings of JSON as rules: of so many characters, of a pattern, other than some. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from router.text.grammar.ebnf import Ranges, Rules, Symbols, literal, one_char, one_of
from router.text.grammar.pattern import Pattern
from router.text.grammar.runs import (
    BACKSLASH,
    HEX,
    SHORT,
    UNSAFE,
    Element,
    Ending,
    Runs,
    escaped,
)

QUOTE = literal('"')


class Strings:
    """Of one grammar."""

    def __init__(self, rules: Rules, after: Symbols) -> None:
        """``after``: what stands behind a string that is part of another value."""
        self._rules, self._runs, self._pattern = rules, Runs(rules), Pattern(rules)
        code = rules.any_of(
            [
                ("[0-9a-cefA-CEF]", HEX, HEX, HEX),
                ("[dD]", "[0-7]", HEX, HEX),
                ("[dD]", "[89abAB]", HEX, HEX, literal("\\u"), "[dD]", "[c-fC-F]", HEX, HEX),
            ],
        )
        self._char = Element(
            name="s",
            plain=one_char(UNSAFE, is_negated=True),
            outside=one_of('"\\'),
            escapes=((BACKSLASH, '["\\\\/bfnrt]'), (literal("\\u"), code)),
        )
        self._inner = Ending(name="i", symbol=QUOTE, after=after)
        self._outer = Ending(name="o", symbol=QUOTE)

    def counted(self, least: int, most: int | None, *, is_inner: bool) -> str:
        """A string of so many characters; None: of any number."""
        ending = self._inner if is_inner else self._outer
        return self._rules.any_of([(QUOTE, self._runs.run(self._char, ending, least, most))])

    def matching(self, pattern: str) -> str:
        """A string that ``pattern`` takes as a whole."""
        return self._rules.any_of([(QUOTE, self._pattern.symbol(pattern), QUOTE)])

    def other_than(self, names: Iterable[str]) -> str:
        """A string that is none of ``names``, as part of another value."""
        rest = self._runs.run(self._char, self._inner, 0, None)
        return self._rules.any_of([(QUOTE, self._avoiding(frozenset(names), rest))])

    def _avoiding(self, names: frozenset[str], rest: str) -> str:
        """What is left of a string that is none of what is left of ``names``."""
        if not names:
            return rest
        children: dict[str, set[str]] = {}
        for name in names - {""}:
            children.setdefault(name[0], set()).add(name[1:])
        known: Ranges = [(ord(char), ord(char)) for char in children]
        alternatives: list[Symbols] = [] if "" in names else [(QUOTE,)]
        alternatives.append((one_char(UNSAFE + known, is_negated=True), rest))
        # ``\uXXXX`` might spell one of the names: here a character is written in one way.
        letters = "".join(letter for char, letter in SHORT.items() if char not in children)
        if letters:
            alternatives.append((BACKSLASH, one_of(letters), rest))
        for char in sorted(children):
            further = self._avoiding(frozenset(children[char]), rest)
            alternatives.append((literal(escaped(ord(char))), further))
        return self._rules.any_of(alternatives)
