"""Strings of JSON as rules: of so many characters, of a pattern, other than some. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from grammar.schemas.ebnf import Ranges, Rules, Symbols, literal, one_char, one_of
from grammar.schemas.pattern import Pattern
from grammar.schemas.runs import (
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
        children: list[dict[str, int]] = [{}]
        ends = set()
        for name in names:
            node = 0
            for char in name:
                if char not in children[node]:
                    children[node][char] = len(children)
                    children.append({})
                node = children[node][char]
            ends.add(node)
        rest = self._runs.run(self._char, self._inner, 0, None)
        symbols = [rest] * len(children)
        for node in reversed(range(len(children))):  # a child comes behind its parent
            further = {char: symbols[child] for char, child in children[node].items()}
            if further or node in ends:
                symbols[node] = self._avoiding(further, rest, is_end=node in ends)
        return self._rules.any_of([(QUOTE, symbols[0])])

    def _avoiding(self, further: Mapping[str, str], rest: str, *, is_end: bool) -> str:
        """What is left of a string, which does not end here where ``is_end``.

        ``further`` has what is left behind some characters, ``rest`` that behind others.
        """
        known: Ranges = [(ord(char), ord(char)) for char in further]
        alternatives: list[Symbols] = [] if is_end else [(QUOTE,)]
        alternatives.append((one_char(UNSAFE + known, is_negated=True), rest))
        # ``\uXXXX`` might spell one of the names: here a character is written in one way.
        letters = "".join(letter for char, letter in SHORT.items() if char not in further)
        if letters:
            alternatives.append((BACKSLASH, one_of(letters), rest))
        for char, symbol in further.items():
            alternatives.append((literal(escaped(ord(char))), symbol))
        return self._rules.any_of(alternatives)
