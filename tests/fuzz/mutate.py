"""How inputs that are JSON are changed as documents: a part for another, one more, one less."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**64, -(2**63), 0.5, 1e300, -0.0, 10**400),
    *("", "a", "\0", "\ufffd", "0", "1" * 5000, [], {}, [[]], [None], {"": 0}),
)
_DEPTH = 600
"""Of what is nested beyond reason."""


def mutated(data: bytes, words: Sequence[str], seed: int, max_size: int) -> bytes | None:
    """Another document than that in ``data``; None: there is none, or it becomes too large."""
    chance = random.Random(seed)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    for _ in range(chance.choice((1, 1, 2, 4))):
        value = _changed(value, words, chance)
    try:
        found = json.dumps(value, ensure_ascii=chance.random() < 0.3).encode(errors="replace")
    except (ValueError, RecursionError):  # an integer of too many digits; too deep
        return None
    return found if len(found) <= max_size else None


def _changed(value: Any, words: Sequence[str], chance: random.Random) -> Any:
    """``value`` with a change somewhere in it."""
    if isinstance(value, dict | list) and value and chance.random() < 0.75:
        key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        changed = value.copy()
        changed[key] = _changed(value[key], words, chance)
        return changed
    if isinstance(value, dict) and chance.random() < 0.8:
        return _other_dict(value, words, chance)
    if isinstance(value, list) and chance.random() < 0.8:
        return _other_list(value, words, chance)
    return _new(words, chance)


def _other_dict(value: dict[str, Any], words: Sequence[str], chance: random.Random) -> Any:
    items = list(value.items())
    if items and chance.random() < 0.4:
        name, _ = items.pop(chance.randrange(len(items)))
        if chance.random() < 0.5:
            items.append((chance.choice((*words, name + "x")), value[name]))
        return dict(items)
    return {**value, chance.choice((*words, "a")): _new(words, chance)}


def _other_list(value: list[Any], words: Sequence[str], chance: random.Random) -> Any:
    found = list(value)
    if found and chance.random() < 0.6:
        at = chance.randrange(len(found))
        return found[:at] + found[at + 1 :] if chance.random() < 0.5 else [*found, found[at]]
    return [*found, _new(words, chance)]


def _new(words: Sequence[str], chance: random.Random) -> Any:
    kind = chance.random()
    if kind < 0.4 and words:
        return chance.choice(words)
    if kind < 0.5:
        return {chance.choice((*words, "a")): chance.choice(_ODD)}
    if kind < 0.52:
        nested: Any = 0
        for _ in range(_DEPTH):
            nested = [nested] if kind < 0.51 else {"a": nested}
        return nested
    return chance.choice(_ODD)
