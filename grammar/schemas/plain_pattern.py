"""Regular expressions without repeats that say nothing: a pattern for the same texts. Pure.

``(x*)*`` takes what ``x*`` takes, and in more ways than a grammar can follow in time: how many grow
with every token. What may be nothing is taken out of a repeat without an end (the star normal form
of Brueggemann-Klein), and a count of counts becomes one count where that misses none.

What is not understood here (an anchor, a reference, an assertion) stays as it is, with all repeats
around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_LEVELS = 64
"""Of groups; a pattern with more of them stays as it is."""
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|U[0-9a-fA-F]{8}|[pP]\{[^}]*\}|c[A-Za-z]"
    r"|[^0-9xuUpPckbBAZzG])",
    re.DOTALL,
)
"""Of one character; anchors and references are none of them."""
_CLASS = re.compile(r"\[(?!\^?\])(?:\\.|[^\\\]\[])*\]", re.DOTALL)
_COUNT = re.compile(r"\{(\d{1,9})(,(\d{1,9})?)?\}|[*+?]")
_OPENING = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")
_OPAQUE = re.compile(r"\\[bBAZzG]|[\^$]")


class _UnknownError(Exception):
    """The pattern has something that is not understood."""


@dataclass(frozen=True, slots=True)
class _Atom:
    """One character, or an anchor."""

    text: str
    is_opaque: bool = False


@dataclass(frozen=True, slots=True)
class _Run:
    """One behind the other; none of them: nothing."""

    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Either:
    """Any one of several."""

    choices: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    """So many times; ``most`` None: any number."""

    body: _Node
    least: int
    most: int | None


_Node = _Atom | _Run | _Either | _Repeat


def plain(pattern: str) -> str:
    """A pattern that takes the same texts; ``pattern`` itself where there is nothing to take out.

    What is not a regular expression stays as it is, too.
    """
    try:
        tree, end = _either(pattern, 0, 0)
    except _UnknownError:
        return pattern
    if end != len(pattern):
        return pattern
    simple = _simple(tree)
    return pattern if simple == tree else _spelled(simple)


def _either(pattern: str, at: int, level: int) -> tuple[_Node, int]:
    """What stands between ``at`` and the end of its group, and where that is."""
    if level > MAX_LEVELS:
        raise _UnknownError
    choices: list[_Node] = []
    parts: list[_Node] = []
    while at < len(pattern) and pattern[at] != ")":
        if pattern[at] == "|":
            choices.append(_run(parts))
            parts, at = [], at + 1
            continue
        part, at = _atom(pattern, at, level)
        found = _COUNT.match(pattern, at)
        if found is not None:
            part, at = _Repeat(part, *_bounds(found)), found.end()
            if pattern[at : at + 1] == "?":  # how it is searched for, not what it takes
                at += 1
            if _COUNT.match(pattern, at):
                raise _UnknownError  # possessive, or none
        parts.append(part)
    return _any_of([*choices, _run(parts)]), at


def _atom(pattern: str, at: int, level: int) -> tuple[_Node, int]:
    opening = _OPENING.match(pattern, at)
    if opening is not None:
        inner, end = _either(pattern, opening.end(), level + 1)
        if end == len(pattern):
            raise _UnknownError
        return inner, end + 1
    if pattern[at] in "\\[":
        found = (_ESCAPE if pattern[at] == "\\" else _CLASS).match(pattern, at)
        if found is not None:
            return _Atom(found[0]), found.end()
    opaque = _OPAQUE.match(pattern, at)
    if opaque is not None:
        return _Atom(opaque[0], is_opaque=True), opaque.end()
    if pattern[at] in "\\[]({}*+?":
        raise _UnknownError
    return _Atom(pattern[at]), at + 1


def _bounds(count: re.Match[str]) -> tuple[int, int | None]:
    if count[1] is None:
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[count[0]]
    least = int(count[1])
    if count[2] is None:
        return least, least
    most = int(count[3]) if count[3] is not None else None
    if most is not None and most < least:
        raise _UnknownError
    return least, most


def _run(parts: Iterable[_Node]) -> _Node:
    flat: list[_Node] = []
    for part in parts:
        flat += part.parts if isinstance(part, _Run) else [part]
    return flat[0] if len(flat) == 1 else _Run(tuple(flat))


def _any_of(choices: Iterable[_Node]) -> _Node:
    flat: dict[_Node, None] = {}
    for choice in choices:
        flat |= dict.fromkeys(choice.choices if isinstance(choice, _Either) else [choice])
    return next(iter(flat)) if len(flat) == 1 else _Either(tuple(flat))


def _simple(node: _Node) -> _Node:
    if isinstance(node, _Run):
        return _run(_simple(part) for part in node.parts)
    if isinstance(node, _Either):
        return _any_of(_simple(choice) for choice in node.choices)
    if isinstance(node, _Atom):
        return node
    body, least, most = _simple(node.body), node.least, node.most
    if most == 0 or body == _Run(()):
        return _Run(())
    if _is_opaque(body):
        return _Repeat(body, least, most)
    if _may_be_nothing(body):
        least = 0
    if most is None and least < 2:
        body = _simple(_without_nothing(body))
        if body == _Run(()):
            return body
    return _counted_once(body, least, most)


def _counted_once(body: _Node, least: int, most: int | None) -> _Node:
    """A count of counts as one, where every number between its ends can be reached."""
    if not isinstance(body, _Repeat):
        return body if (least, most) == (1, 1) else _Repeat(body, least, most)
    if body.most is None:
        is_gapless = least == most or least > 0 or body.least <= 1
    else:
        is_gapless = least == most or body.least - 1 <= least * (body.most - body.least)
    if not is_gapless:
        return _Repeat(body, least, most)
    whole = None if most is None or body.most is None else most * body.most
    return _counted_once(body.body, least * body.least, whole)


def _without_nothing(node: _Node) -> _Node:
    """Other texts than nothing, of which any number are the same as of ``node``'s."""
    if isinstance(node, _Either):
        found = [_without_nothing(choice) for choice in node.choices]
        kept = [choice for choice in found if choice != _Run(())]
        return _any_of(kept) if kept else _Run(())
    if isinstance(node, _Run) and node.parts:
        needed = [index for index, part in enumerate(node.parts) if not _may_be_nothing(part)]
        if not needed:
            return _without_nothing(_Either(node.parts))
        if len(needed) == 1:  # where the others are nothing, one more of it is one more of all
            (index,) = needed
            parts = list(node.parts)
            parts[index] = _without_nothing(parts[index])
            return _run(parts)
    if isinstance(node, _Repeat) and node.least < 2:
        return _without_nothing(node.body)
    return node


def _may_be_nothing(node: _Node) -> bool:
    if isinstance(node, _Run):
        return all(map(_may_be_nothing, node.parts))
    if isinstance(node, _Either):
        return any(map(_may_be_nothing, node.choices))
    return isinstance(node, _Repeat) and (node.least == 0 or _may_be_nothing(node.body))


def _is_opaque(node: _Node) -> bool:
    if isinstance(node, _Run):
        return any(map(_is_opaque, node.parts))
    if isinstance(node, _Either):
        return any(map(_is_opaque, node.choices))
    return _is_opaque(node.body) if isinstance(node, _Repeat) else node.is_opaque


def _spelled(node: _Node) -> str:
    if isinstance(node, _Run):
        return "".join(
            f"(?:{_spelled(part)})" if isinstance(part, _Either) else _spelled(part)
            for part in node.parts
        )
    if isinstance(node, _Either):
        return "|".join(map(_spelled, node.choices))
    if isinstance(node, _Atom):
        return node.text
    is_char = isinstance(node.body, _Atom) and not node.body.is_opaque
    body = _spelled(node.body) if is_char else f"(?:{_spelled(node.body)})"
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.least, node.most))
    if short is not None:
        return body + short
    most = "" if node.most is None else node.most
    return body + (f"{{{most}}}" if node.least == node.most else f"{{{node.least},{most}}}")
