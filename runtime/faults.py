"""What to break on purpose in the KV transfer: the language of ``kv_transfer.faults``. Pure.

    delay=0.2@0.05,fail=0.02,late=0.01@0.5,seed=7,on=prefill-1

Each kind has the share of posts that it befalls and, where it takes time, its seconds. The fate of
a post follows from the seed, the worker and the post's number alone, so a run can be repeated.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from runtime.errors import ConfigError

FIELD = "kv_transfer.faults"


class FaultKind(enum.Enum):
    """What happens to a post; the value is its name in configurations."""

    DELAY = "delay"
    """It is handed on after ``delay_s``, PENDING until then."""
    REORDER = "reorder"
    """It is handed on after the next post of its connection, or after ``delay_s``."""
    STALL = "stall"
    """It is handed on at once; its end is reported ``delay_s`` later."""
    DROP = "drop"
    """It stays PENDING until the connection is closed, then it is FAILED; nothing is written."""
    FAIL = "fail"
    """It is FAILED at once; nothing is written."""
    PARTIAL = "partial"
    """The first half of its bytes is written, then it is FAILED."""
    DUPLICATE = "duplicate"
    """It is written and announced twice before it is DONE."""
    MUTE = "mute"
    """Its bytes are written, its notification is lost."""
    LATE = "late"
    """It is FAILED at once, and its bytes (as they are now) land after ``delay_s`` all the same."""
    DISCONNECT = "disconnect"
    """The connection is lost with everything on it, as when the peer restarts."""

    @property
    def default_delay_s(self) -> float | None:
        """Seconds where the rule has none; None where the kind takes no time."""
        return _DEFAULT_DELAYS_S.get(self)


_DEFAULT_DELAYS_S = {
    FaultKind.DELAY: 0.05,
    FaultKind.REORDER: 0.05,
    FaultKind.STALL: 0.05,
    FaultKind.LATE: 0.5,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """The fate of one post; ``delay_s`` in seconds."""

    kind: FaultKind
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FaultRule:
    """``fault`` befalls this share of all posts."""

    fault: Fault
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """All rules of a configuration."""

    rules: tuple[FaultRule, ...] = ()
    seed: int = 0
    on: str = ""
    """The only instance that is affected; empty is all."""

    def affects(self, instance: str) -> bool:
        """Whether posts of ``instance`` can fail."""
        return bool(self.rules) and self.on in ("", instance)

    def fate(self, worker: str, index: int) -> Fault | None:
        """What befalls post ``index`` (from 0) of ``worker``; None lets it through."""
        drawn = random.Random(f"{self.seed}/{worker}/{index}").random()
        for rule in self.rules:
            drawn -= rule.share
            if drawn < 0:
                return rule.fault
        return None


def parse_faults(text: str) -> FaultPlan:
    """The plan that ``text`` describes; an empty text is an empty plan.

    Raises:
        ConfigError: an item that is none, or shares beyond 1 together.
    """
    rules: list[FaultRule] = []
    seed, on = 0, ""
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = item.partition("=")
        if name == "seed":
            seed = int(_number(text, item, value, most=2**63))
        elif name == "on":
            on = value
        else:
            rules.append(_parse_rule(text, item, name, value))
    if sum(rule.share for rule in rules) > 1.0:
        raise ConfigError(FIELD, text, "the shares exceed 1", "shares that leave posts whole")
    if text.strip() and not rules:
        raise ConfigError(FIELD, text, "no rule", f"at least one of {_kinds()}")
    return FaultPlan(rules=tuple(rules), seed=seed, on=on)


def _parse_rule(text: str, item: str, name: str, value: str) -> FaultRule:
    try:
        kind = FaultKind(name)
    except ValueError:
        raise ConfigError(FIELD, text, f"no fault {name!r}", f"one of {_kinds()}") from None
    share, at, seconds = value.partition("@")
    delay_s = kind.default_delay_s
    if at:
        if delay_s is None:
            raise ConfigError(FIELD, text, f"{name!r} takes no time", f"{name}={share}")
        delay_s = _number(text, item, seconds, most=3600.0)
    return FaultRule(Fault(kind, delay_s or 0.0), _number(text, item, share, most=1.0))


def _number(text: str, item: str, value: str, *, most: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0.0 <= number <= most:
        fix = "kind=share@seconds, as delay=0.2@0.05"
        raise ConfigError(FIELD, text, f"{item!r} has no number in [0, {most:g}]", fix)
    return number


def _kinds() -> str:
    return ", ".join(kind.value for kind in FaultKind)
