"""What the tiers that a key names come to among those that are configured. Pure.

`tandem keys add` knows no configuration, and a tier may go while keys name it. Such a key keeps the
tiers that there are, and never gets another for the one that is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.keys.record import KeyRecord
from runtime.errors import ConfigError
from runtime.tiers import Tiers


def allowed_tiers(tiers: Tiers, key: KeyRecord | None) -> tuple[str, ...]:
    """Those that requests of ``key`` (None: of nobody's) may have, first in order first."""
    if key is None:
        return tiers.open
    named = key.tiers or (*tiers.open, key.tier)
    return tuple(name for name in tiers.names if name in named)


def usual_tier(tiers: Tiers, key: KeyRecord | None) -> str:
    """That of requests of ``key`` which name none; empty: it may have none."""
    allowed = allowed_tiers(tiers, key)
    wanted = (key.tier if key is not None else "", tiers.default, *allowed[-1:])
    return next((name for name in wanted if name in allowed), "")


def unreachable_tiers(tiers: Tiers, keys: Iterable[KeyRecord]) -> tuple[str, ...]:
    """Those that requests of none of ``keys`` (none: nobody is asked for one) may have."""
    asking: Sequence[KeyRecord | None] = list(keys) or [None]
    reached = {name for key in asking for name in allowed_tiers(tiers, key)}
    return tuple(name for name in tiers.names if name not in reached)


def unknown_tiers(tiers: Tiers, key: KeyRecord) -> tuple[str, ...]:
    """Those that ``key`` names and that are not configured, as it names them."""
    named = dict.fromkeys((*key.tiers, *filter(None, [key.tier])))
    return tuple(name for name in named if name not in tiers.names)


def told_of_unknown(tiers: Tiers, key: KeyRecord) -> str:
    """What holds for ``key``, which names tiers that are not configured, and the fix."""
    names = ", ".join(map(repr, unknown_tiers(tiers, key)))
    usual = usual_tier(tiers, key)
    if not tiers:
        held = "no tiers are configured, so its tiers say nothing"
    elif usual:
        held = f"its requests that name none are of {usual!r}"
    else:
        held = "requests of it are answered 403"
    return f"tiers={names} {held}. Fix: {_fix(tiers)}"


def check_tiers_of(keys: Iterable[KeyRecord], tiers: Tiers) -> None:
    """Refuse a key that names a tier which is not configured.

    Raises:
        ConfigError: names the key, the tier and the fix.
    """
    for key in keys:
        for name in unknown_tiers(tiers, key):
            field = "tiers" if name in key.tiers else "tier"
            problem = "is no tier of the configuration"
            raise ConfigError(f"keys.{key.name}.{field}", name, problem, _fix(tiers))


def _fix(tiers: Tiers) -> str:
    if not tiers:
        return "take it out of the key, or configure it as [[tiers]]"
    return f"one of {', '.join(tiers.names)}, or configure it as [[tiers]]"
