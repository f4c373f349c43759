"""The tokens of a step among tiers: full steps, guaranteed shares, targets of the first tiers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill.fair_share import share_tokens
from prefill.tier_shares import StepLimits, Want, share_among_tiers
from runtime.metrics.step_time import StepTime

UNKNOWN = StepTime()
TIERS = st.lists(
    st.tuples(st.floats(0, 0.33), st.lists(st.integers(1, 300), min_size=1, max_size=5)),
    max_size=3,
)


def wants_of(tiers: list[tuple[float, list[int]]], deadline: float = math.inf) -> list[Want]:
    return [
        Want(order, share, num_tokens, deadline)
        for order, (share, wanted) in enumerate(tiers)
        for num_tokens in wanted
    ]


def by_tier(wants: list[Want], shares: list[int]) -> dict[int, int]:
    totals: dict[int, int] = {}
    for want, share in zip(wants, shares, strict=True):
        totals[want.order] = totals.get(want.order, 0) + share
    return totals


def steps_of(fixed: float, per_token: float) -> StepTime:
    steps = StepTime()
    for size in (10, 1000):
        steps.observe(size, fixed + per_token * size)
    return steps


@given(TIERS, st.integers(3, 64), st.integers(3, 8))
def test_a_step_is_full_and_every_tier_has_its_share_of_it(
    tiers: list[tuple[float, list[int]]], budget: int, max_shares: int
) -> None:
    wants = wants_of(tiers)
    shares = share_among_tiers(wants, StepLimits(budget, max_shares), UNKNOWN, 0.0)
    assert all(0 <= share <= want.num_tokens for want, share in zip(wants, shares, strict=True))
    num_shares = sum(share > 0 for share in shares)
    assert sum(shares) <= budget
    assert num_shares <= max_shares
    if num_shares < max_shares:
        assert sum(shares) == min(budget, sum(want.num_tokens for want in wants))
    for order, total in by_tier(wants, shares).items():
        share, wanted = tiers[order]
        if share:
            assert total >= min(max(1, math.floor(share * budget)), wanted[0])


@given(st.lists(st.integers(1, 300), max_size=8), st.integers(1, 64), st.integers(1, 8))
def test_one_tier_is_shared_as_without_tiers(wanted: list[int], budget: int, most: int) -> None:
    wants = wants_of([(0.0, wanted)])
    shares = share_among_tiers(wants, StepLimits(budget, most), UNKNOWN, 0.0)
    assert shares == (share_tokens(wanted, budget, most) if wanted else [])


@given(TIERS, st.integers(3, 64), st.floats(0.0, 2.0))
def test_targets_never_leave_a_step_empty_or_a_share_unpaid(
    tiers: list[tuple[float, list[int]]], budget: int, deadline: float
) -> None:
    wants = wants_of(tiers, deadline)
    shares = share_among_tiers(wants, StepLimits(budget, 8), steps_of(0.01, 0.001), 0.0)
    assert sum(shares) > 0 or not wants
    for order, total in by_tier(wants, shares).items():
        assert total >= 1 or not tiers[order][0]


def test_the_first_tier_goes_first_and_the_rest_of_the_step_is_others() -> None:
    wants = wants_of([(0.5, [100, 100]), (0.0, [5000])])
    assert share_among_tiers(wants, StepLimits(1000, 16), UNKNOWN, 0.0) == [100, 100, 800]
    wants = wants_of([(0.5, [5000]), (0.1, [5000]), (0.0, [5000])])
    assert share_among_tiers(wants, StepLimits(1000, 16), UNKNOWN, 0.0) == [900, 100, 0]


@pytest.mark.parametrize(
    ("deadline", "behind"),
    [
        (math.inf, 800),
        (10.0, 800),
        (0.5, 290),  # 10 ms and 1 ms a token: 200 tokens take 210 ms
        (0.25, 100),  # its share
        (0.1, 800),  # out of reach: nobody is held back for nothing
        (-1.0, 800),
    ],
)
def test_a_chunk_behind_is_shortened_where_a_first_token_would_be_late(
    deadline: float, behind: int
) -> None:
    wants = [Want(0, 0.5, 200, deadline), Want(1, 0.1, 5000, math.inf)]
    shares = share_among_tiers(wants, StepLimits(1000, 16), steps_of(0.01, 0.001), 0.0)
    assert shares[0] == 200
    assert shares[1] == pytest.approx(behind, abs=1)


def test_a_place_is_kept_for_every_tier_with_a_share() -> None:
    wants = wants_of([(0.5, [1] * 10), (0.0, [1]), (0.1, [50])])
    shares = share_among_tiers(wants, StepLimits(100, 4), UNKNOWN, 0.0)
    assert shares == [1, 1, 1, *[0] * 7, 0, 50]
