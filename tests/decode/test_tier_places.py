"""Places of a step among tiers: all given out, shares kept, targets of the first tiers kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.tier_places import TierCount, places_by_tier
from runtime.metrics.step_time import StepTime

UNKNOWN = StepTime()


def steps_of(fixed: float, per_request: float) -> StepTime:
    steps = StepTime()
    for size in (1, 100):
        steps.observe(size, fixed + per_request * size)
    return steps


TIERS = st.lists(
    st.tuples(st.floats(0, 0.33), st.floats(0, 0.1), st.integers(1, 40)), min_size=1, max_size=3
).map(lambda tiers: [TierCount(order, *tier) for order, tier in enumerate(tiers)])


@given(TIERS, st.integers(3, 64))
def test_without_known_steps_all_places_are_given_out(tiers: list[TierCount], most: int) -> None:
    places = places_by_tier(tiers, most, UNKNOWN)
    assert sum(places.values()) == min(most, sum(tier.num_requests for tier in tiers))


@given(TIERS, st.integers(3, 64), st.floats(0, 0.05), st.floats(0.0001, 0.01))
def test_somebody_always_runs_and_every_share_is_kept(
    tiers: list[TierCount], most: int, fixed: float, per_request: float
) -> None:
    places = places_by_tier(tiers, most, steps_of(fixed, per_request))
    assert 1 <= sum(places.values()) <= most
    for tier in tiers:
        assert 0 <= places[tier.order] <= tier.num_requests
        if tier.share:
            assert places[tier.order] >= min(tier.num_requests, max(1, int(tier.share * most)))
    assert places[tiers[0].order] >= 1


def test_the_rest_goes_to_the_tiers_in_order() -> None:
    tiers = [TierCount(0, 0.5, 0, 7), TierCount(1, 0.25, 0, 9), TierCount(2, 0, 0, 9)]
    assert places_by_tier(tiers, 10, UNKNOWN) == {0: 7, 1: 3, 2: 0}
    tiers = [TierCount(0, 0.5, 0, 20), TierCount(1, 0.25, 0, 9)]
    assert places_by_tier(tiers, 10, UNKNOWN) == {0: 8, 1: 2}


@pytest.mark.parametrize(
    ("target_s", "behind"),
    [
        (0.0, 54),
        (1.0, 54),
        (0.030, 10),  # 10 ms and 1 ms a request: 20 requests
        (0.021, 6),  # its share
        (0.019, 54),  # out of reach
    ],
)
def test_those_behind_leave_a_step_short_enough(target_s: float, behind: int) -> None:
    tiers = [TierCount(0, 0.5, target_s, 10), TierCount(1, 0.1, 0.0, 100)]
    places = places_by_tier(tiers, 64, steps_of(0.010, 0.001))
    assert places[0] == 10
    assert places[1] == pytest.approx(behind, abs=1)
