"""Tiers of service: a request's standing, and whose turn it is where several tiers wait. Pure.

Router, prefill and decode all choose by this file, each for what it gives out: places in flight,
prompt tokens of a step, blocks of KV. Two rules, and no clock:

1. A tier that is owed the cost of its next request by its share goes first.
2. Otherwise the first tier in order goes.

What tier i is owed, in the unit of costs, after a grant of cost c, while somebody of it waits:

    owed_i := max(0, owed_i + share_i * c - (c if the grant was of tier i else 0))

and 0 as soon as nobody of it waits, so that nothing is hoarded. With shares of 1 at most together
and n tiers, no tier is ever owed (n + 1) * C or more, where C is the largest cost: a grant by rule
1 adds nothing to the sum of all that is owed; rule 2 needs every tier below C, so the sum below
n * C, and adds C at most. So over any stretch in which tier i waits and W is given out in all, it
gets

    S_i > share_i * W - (n + 1) * C

which bounds its wait. Somebody always gets a turn where anybody waits. Without tiers all requests
have one standing, and the order is that of arrival.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeVar

from runtime.config.tiers import TierSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Before whom a request goes, and what its tier is promised; the default is that of no tiers.

    It travels with the request, so that workers need no list of tiers of their own.
    """

    tier: str = ""
    """Its name; empty: there are no tiers."""
    order: int = 0
    """The lowest goes first."""
    priority: int = 0
    """Within the tier; the lowest goes first."""
    share: float = 0.0
    """Of capacity, what the tier gets at least."""
    ttft_s: float = 0.0
    """Target from here to the first token: in the router from arrival, in a worker what is left of
    it when the request comes; 0: none, or it is over."""
    tpot_s: float = 0.0
    """Target for each further token; 0: none."""
    tenant: str = field(default="", compare=False)
    """Whose request it is; empty: nobody is asked. Routers alone know it."""

    @property
    def place(self) -> tuple[int, int]:
        """By which requests are sorted, before the time of their arrival."""
        return self.order, self.priority

    @property
    def has_target(self) -> bool:
        """Whether something is promised that whoever goes before it could break."""
        return self.ttft_s > 0.0 or self.tpot_s > 0.0

    def with_ttft_left(self, waited_s: float) -> Standing:
        """The same after the request has waited for so long."""
        if not self.ttft_s:
            return self
        return replace(self, ttft_s=max(0.0, self.ttft_s - waited_s))


NO_TIER = Standing()


class TierTokens(NamedTuple):
    """Prompt tokens of one tier that are still to be computed by a worker."""

    order: int
    """Of the tier; the lowest goes first."""
    share: float
    """Of every step's tokens, what the tier gets at least."""
    num_tokens: int


def tokens_ahead(queue: Sequence[TierTokens], order: int) -> float:
    """Tokens that a worker computes before it has computed all of this tier and those before it.

    Tiers behind get their shares of every step meanwhile, and no more of it than they have.

    Args:
        queue: of one worker, each tier once.
        order: of the tier that asks.
    """
    work = sum(tier.num_tokens for tier in queue if tier.order <= order)
    behind = [tier for tier in queue if tier.order > order and tier.share > 0.0]
    share = sum(tier.share for tier in behind)
    for tier in sorted(behind, key=lambda tier: tier.num_tokens / tier.share):
        if share < 1.0 and tier.num_tokens >= tier.share * work / (1.0 - share):
            break
        # It has less than its share comes to: all of it is computed.
        work += tier.num_tokens
        share -= tier.share
    return work / (1.0 - share) if behind else work


class Tiers:
    """The tiers of a cluster, first in order first; none: nothing here has an effect."""

    def __init__(self, sections: Sequence[TierSection] = ()) -> None:
        ordered = sorted(sections, key=lambda tier: tier.order)
        self._standings = {
            tier.name: Standing(
                tier=tier.name,
                order=tier.order,
                share=tier.share,
                ttft_s=tier.ttft_ms / 1000,
                tpot_s=tier.tpot_ms / 1000,
            )
            for tier in ordered
        }
        marked = [tier.name for tier in ordered if tier.default]
        self.default = (marked or [tier.name for tier in ordered[-1:]] or [""])[0]
        """The tier of requests that say nothing; empty: there are no tiers."""
        least = self.standing(self.default).order
        self.open = tuple(tier.name for tier in ordered if tier.open or tier.order >= least)
        """Those that anybody may ask for, first in order first."""

    def __bool__(self) -> bool:
        return bool(self._standings)

    @property
    def names(self) -> tuple[str, ...]:
        """First in order first."""
        return tuple(self._standings)

    @property
    def last(self) -> str:
        """The tier that every other goes before; empty: there are no tiers."""
        return self.names[-1] if self._standings else ""

    def standing(self, name: str, priority: int = 0) -> Standing:
        """Of a request of the tier ``name``, which must be one, or empty where there are none."""
        found = self._standings[name] if self._standings else NO_TIER
        return replace(found, priority=priority) if priority else found


class Ranked(Protocol):
    """What a queue of several tiers holds."""

    @property
    def standing(self) -> Standing:
        """Its tier and priority."""


RankedT = TypeVar("RankedT", bound=Ranked)


def first_of_tiers(
    queue: Sequence[RankedT], key: Callable[[RankedT], tuple[float, ...]], size: int
) -> dict[int, Sequence[RankedT]]:
    """The first ``size`` requests at most of every tier in ``queue``, by order, lowest first.

    Args:
        queue: sorted by ``key``.
        key: begins with the order of the tier.
        size: 1 at least.
    """
    tiers: dict[int, Sequence[RankedT]] = {}
    start = 0
    while start < len(queue):
        order = queue[start].standing.order
        behind: tuple[float, ...] = (order + 1,)
        end = bisect_left(queue, behind, lo=start, key=key)
        tiers[order] = queue[start : min(end, start + size)]
        start = end
    return tiers


class Demand(NamedTuple):
    """A tier of which somebody waits, as the one who gives out sees it."""

    order: int
    share: float
    cost: float
    """Of its next request."""


class TierPolicy:
    """Whose turn it is. One for each thing that is given out; used by one thread."""

    def __init__(self) -> None:
        self._owed: dict[int, float] = {}
        """By order; of tiers that waited at the last grant."""

    def owed(self, order: int) -> float:
        """What the tier of this order is owed, in the unit of costs."""
        return self._owed.get(order, 0.0)

    def turn(self, waiting: Sequence[Demand]) -> int:
        """The order of the tier that goes next.

        Args:
            waiting: every tier of which somebody waits, in any order; not empty.
        """
        due = [tier.order for tier in waiting if 0.0 < tier.cost <= self.owed(tier.order)]
        return min(due or [tier.order for tier in waiting])

    def granted(self, order: int, waiting: Sequence[Demand], cost: float | None = None) -> None:
        """Account for a grant to the tier of this order.

        Args:
            order: who got it.
            waiting: as for ``turn``, from before the grant.
            cost: what it got; None: what its demand says.
        """
        if cost is None:
            cost = next(tier.cost for tier in waiting if tier.order == order)
        self._owed = {
            tier.order: max(
                0.0,
                self.owed(tier.order) + tier.share * cost - (cost if tier.order == order else 0.0),
            )
            for tier in waiting
        }
