"""How many requests of each tier of service a step runs. Pure: counts in, counts out.

Every tier with a share has that share of the places, and one at least. The rest goes to the tiers
in order. More requests make a step longer, and a step is what a token takes: so a tier gets no
places beyond its share that would make the steps of a tier before it longer than that one's target,
by the measured time of steps. A target that the tiers before could not meet alone holds nobody
back. With one tier there is nothing to decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from decode.requests import DecodeRequest, place_of
from runtime.metrics.step_time import StepTime


class TierCount(NamedTuple):
    """A tier of which requests are here, whose KV is complete."""

    order: int
    share: float
    tpot_s: float
    """Target for a token; 0: none."""
    num_requests: int


def places_by_tier(
    tiers: Sequence[TierCount], max_num_seqs: int, steps: StepTime, *, margin: float = 1.0
) -> dict[int, int]:
    """Return how many requests of each tier may run, by its order.

    Args:
        tiers: in order.
        max_num_seqs: most requests of a step.
        steps: seconds of a step by its requests.
        margin: of every target, what a step may take.
    """
    places: dict[int, int] = {}
    left = max_num_seqs
    for tier in tiers:
        own = max(1, math.floor(tier.share * max_num_seqs)) if tier.share else 0
        places[tier.order] = min(tier.num_requests, own, left)
        left -= places[tier.order]
    most = max_num_seqs
    for tier in tiers:
        free = max(0, most - sum(places.values()))
        places[tier.order] += min(tier.num_requests - places[tier.order], free)
        target_s = margin * tier.tpot_s
        if target_s and steps.is_known:
            num_before = sum(places[other.order] for other in tiers if other.order <= tier.order)
            if steps.seconds(num_before) <= target_s:
                most = min(most, steps.largest_within(target_s, max_num_seqs))
    return places


START_MARGIN = 0.9
"""Nobody starts who would bring a step nearer to a target than this: he would soon have to stop."""


def count_tiers(requests: Iterable[DecodeRequest]) -> list[TierCount]:
    """The tiers of these requests, in order."""
    counts: dict[int, TierCount] = {}
    for request in requests:
        standing = request.standing
        known = counts.get(standing.order)
        number = known.num_requests if known else 0
        counts[standing.order] = TierCount(
            standing.order, standing.share, standing.tpot_s, number + 1
        )
    return [counts[order] for order in sorted(counts)]


class Places:
    """Places of the next step, as they are taken."""

    def __init__(
        self,
        requests: Sequence[DecodeRequest],
        running: Iterable[DecodeRequest],
        max_num_seqs: int,
        steps: StepTime,
        *,
        margin: float = 1.0,
    ) -> None:
        """``running`` have one each; ``requests`` are they and all that might have one."""
        tiers = count_tiers(requests)
        self._most = max_num_seqs
        self._of_tier = places_by_tier(tiers, max_num_seqs, steps, margin=margin)
        self._taken = dict.fromkeys(self._of_tier, 0)
        for request in running:
            self._taken[request.standing.order] += 1

    @property
    def are_all_taken(self) -> bool:
        """Whether nobody may start."""
        return sum(self._taken.values()) >= self._most

    def has_one(self, request: DecodeRequest) -> bool:
        """Whether one more of its tier may start."""
        order = request.standing.order
        return not self.are_all_taken and self._taken[order] < self._of_tier[order]

    def take(self, request: DecodeRequest) -> None:
        """It starts."""
        self._taken[request.standing.order] += 1

    def too_many(self, running: Sequence[DecodeRequest]) -> list[DecodeRequest]:
        """Who has to leave his place: the last of every tier that has more than it may."""
        leaving: list[DecodeRequest] = []
        for order, places in self._of_tier.items():
            own = [request for request in running if request.standing.order == order]
            leaving += own[places:]
        return leaving


def has_tiers(queues: Sequence[Sequence[DecodeRequest]]) -> bool:
    """Whether requests of several tiers are in these queues, each of which is in order."""
    ends = (item.standing.order for queue in queues if queue for item in (queue[0], queue[-1]))
    return len(set(ends)) > 1


def last_to_yield(
    running: Sequence[DecodeRequest], waiting: Sequence[DecodeRequest]
) -> DecodeRequest:
    """Whose blocks are taken first: the last that runs, or is parked and in no launched step."""
    parked = [item for item in waiting if item.is_parked and not item.request.num_launched_tokens]
    return max([*parked[-1:], running[-1]], key=place_of)
