"""Whether a grammar derives any text at all. Pure.

A rule that only leads to itself is a grammar for the library, and a model that follows it writes
for ever. A rule is productive if one of its sequences holds none but productive rules: the least
fixed point, as in any textbook on grammars.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

VERSION = "v16"
"""Of the library's written form of a grammar, which is read here."""
_RULE, _SEQUENCE, _CHOICES, _REPEAT = 4, 5, 6, 8


def is_productive(serialized: str) -> bool:
    """Whether the root of a grammar in the library's written form derives a text.

    Raises:
        ValueError: the form is of another version.
    """
    grammar = json.loads(serialized)
    if grammar["__VERSION__"] != VERSION:
        raise ValueError(f"a grammar of version {grammar['__VERSION__']}, not {VERSION}")
    data, starts = grammar["grammar_expr_data"], grammar["grammar_expr_indptr"]
    bodies = [rule[1] for rule in grammar["rules"]]
    users: dict[int, list[int]] = {}
    for rule, body in enumerate(bodies):
        for used in _rules_in(body, data, starts):
            users.setdefault(used, []).append(rule)
    productive: set[int] = set()
    waiting = list(range(len(bodies)))
    while waiting:
        rule = waiting.pop()
        if rule in productive or not _derives(bodies[rule], data, starts, productive.__contains__):
            continue
        productive.add(rule)
        waiting += users.get(rule, ())
    return grammar["root_rule_id"] in productive


def _parts(expression: int, data: Sequence[int], starts: Sequence[int]) -> tuple[int, list[int]]:
    """(kind, arguments) of an expression."""
    start = starts[expression]
    return data[start], list(data[start + 2 : start + 2 + data[start + 1]])


def _rules_in(expression: int, data: Sequence[int], starts: Sequence[int]) -> list[int]:
    found, waiting = [], [expression]
    while waiting:
        kind, arguments = _parts(waiting.pop(), data, starts)
        if kind in (_RULE, _REPEAT):
            found.append(arguments[0])
        elif kind in (_SEQUENCE, _CHOICES):
            waiting += arguments
    return found


def _derives(
    expression: int, data: Sequence[int], starts: Sequence[int], is_known: Callable[[int], bool]
) -> bool:
    """Expressions nest to a small depth: the library gives what is nested a rule of its own."""
    kind, arguments = _parts(expression, data, starts)
    if kind == _RULE:
        return is_known(arguments[0])
    if kind == _REPEAT:
        return arguments[1] == 0 or is_known(arguments[0])
    if kind == _SEQUENCE:
        return all(_derives(each, data, starts, is_known) for each in arguments)
    if kind == _CHOICES:
        return any(_derives(each, data, starts, is_known) for each in arguments)
    return True
