"""``[[tiers]]``: who goes first, and what every tier of service is promised."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.config.checks import at_least
from runtime.errors import ConfigError

MAX_TIERS = 8
"""Each is a label of metrics, and a queue wherever requests wait."""
RESERVED_NAMES = ("auto", "default")
"""What a request's ``service_tier`` may say instead of a name."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSection:
    """One ``[[tiers]]`` table."""

    name: str = ""
    """As ``service_tier`` of a request, ``tiers`` of a key and the labels of metrics say it."""
    order: int = 0
    """The tier with the lowest goes first."""
    ttft_ms: float = 0.0
    """Target from a request's arrival to its first token; 0: none."""
    tpot_ms: float = 0.0
    """Target for each further token, in the mean of a request; 0: none."""
    share: float = 0.0
    """Of capacity, what the tier gets at least while requests of it wait, whoever else does; what
    it does not use is free to others. All shares together are 1 at most."""
    default: bool = False
    """Requests that name no tier, and whose key names none, are of this one; without any such tier
    of the last in order."""
    open: bool = False
    """Anybody may ask for it, with a key that lists no tiers or without one. The default tier and
    those behind it in order are open in any case; one before it is for keys that list it."""

    def __post_init__(self) -> None:
        path = f"tiers.{self.name}"
        if not _NAME.fullmatch(self.name):
            fix = "1 to 32 of a-z, 0-9, '_' and '-', a letter or digit first"
            raise ConfigError("tiers.name", self.name, "is a label and a word of requests", fix)
        if self.name in RESERVED_NAMES:
            problem = "has a meaning of its own in service_tier"
            raise ConfigError("tiers.name", self.name, problem, "another name")
        at_least(f"{path}.order", self.order, 0)
        for field in ("ttft_ms", "tpot_ms", "share"):
            value = getattr(self, field)
            if not math.isfinite(value):
                raise ConfigError(f"{path}.{field}", value, "is no number", "a finite number")
            at_least(f"{path}.{field}", value, 0.0)
        if self.share > 1.0:
            raise ConfigError(f"{path}.share", self.share, "is above 1", "0 to 1")


def check_tiers(tiers: Sequence[TierSection]) -> None:
    """Refuse tiers that do not go together.

    Raises:
        ConfigError: two of one name or order, several defaults, too many, or too large shares.
    """
    if len(tiers) > MAX_TIERS:
        raise ConfigError("tiers", len(tiers), "are too many", f"{MAX_TIERS} at most")
    owners: dict[object, str] = {}
    for tier in tiers:
        if tier.name in {other.name for other in tiers if other is not tier}:
            raise ConfigError("tiers.name", tier.name, "is the name of two tiers", "two names")
        other = owners.setdefault(tier.order, tier.name)
        if other != tier.name:
            problem = f"is the order of {other!r}, too"
            raise ConfigError(f"tiers.{tier.name}.order", tier.order, problem, "one for each tier")
    defaults = [tier.name for tier in tiers if tier.default]
    if len(defaults) > 1:
        problem = f"so is {defaults[0]!r}"
        raise ConfigError(f"tiers.{defaults[1]}.default", True, problem, "one default tier")
    total = math.fsum(tier.share for tier in tiers)
    if total > 1.0 + 1e-9:
        last = tiers[-1]
        problem = f"makes the shares of all tiers {total:g}"
        raise ConfigError(f"tiers.{last.name}.share", last.share, problem, "1 or less together")
