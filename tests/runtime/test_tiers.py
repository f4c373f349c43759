"""Whose turn it is among tiers: in order, never nobody's, and nobody waits beyond his share."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config.tiers import TierSection
from runtime.tiers import (
    NO_TIER,
    Demand,
    Standing,
    TierPolicy,
    Tiers,
    TierTokens,
    first_of_tiers,
    tokens_ahead,
)


@dataclass
class Line:
    """Requests that wait, by tier: their costs, first come first."""

    shares: dict[int, float]
    costs: dict[int, list[int]] = field(default_factory=dict)

    @property
    def waiting(self) -> list[Demand]:
        return [
            Demand(order, self.shares[order], costs[0])
            for order, costs in self.costs.items()
            if costs
        ]


SHARES = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5).map(
    lambda shares: [share / max(1.0, sum(shares)) for share in shares]
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 4), st.integers(1, 9)),
        st.tuples(st.just("grant"), st.just(0), st.just(0)),
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=300)
@given(SHARES, STEPS)
def test_a_tier_gets_its_share_of_any_stretch_in_which_it_waits(
    shares: list[float], steps: list[tuple[str, int, int]]
) -> None:
    line = Line(dict(enumerate(shares)), {order: [] for order in range(len(shares))})
    policy, num_tiers, most = TierPolicy(), len(shares), 9
    lag = dict.fromkeys(line.shares, 0.0)  # of the worst stretch that ends now
    for kind, order, cost in steps:
        if kind == "arrive":
            line.costs[order % num_tiers].append(cost)
            continue
        waiting = line.waiting
        if not waiting:
            continue
        turn = policy.turn(waiting)
        assert turn in {tier.order for tier in waiting}  # somebody goes, and somebody who waits
        given_out = line.costs[turn].pop(0)
        policy.granted(turn, waiting)
        for tier in waiting:
            own = given_out if tier.order == turn else 0.0
            lag[tier.order] = max(0.0, lag[tier.order] + tier.share * given_out - own)
            assert lag[tier.order] < (num_tiers + 1) * most + 1e-6
        for tier_order, costs in line.costs.items():
            if not costs:
                lag[tier_order] = 0.0


@given(st.lists(st.integers(1, 9), min_size=1), st.integers(1, 5))
def test_without_shares_the_first_in_order_goes(costs: list[int], num_tiers: int) -> None:
    line = Line(dict.fromkeys(range(num_tiers), 0.0))
    line.costs = {order: costs[order::num_tiers] for order in range(num_tiers)}
    policy, turns = TierPolicy(), []
    while waiting := line.waiting:
        turns.append(policy.turn(waiting))
        line.costs[turns[-1]].pop(0)
        policy.granted(turns[-1], waiting)
    assert turns == sorted(turns)
    assert len(turns) == len(costs)


def test_a_low_tier_goes_as_often_as_its_share_says_and_no_more() -> None:
    line = Line({0: 0.5, 1: 0.1}, {0: [1] * 2000, 1: [1] * 2000})
    policy, turns = TierPolicy(), []
    for _ in range(1000):
        waiting = line.waiting
        turns.append(policy.turn(waiting))
        line.costs[turns[-1]].pop(0)
        policy.granted(turns[-1], waiting)
    assert turns.count(1) == 100 or turns.count(1) == 99  # the last may be due and not yet gone
    places = [index for index, turn in enumerate(turns) if turn == 1]
    assert max(after - before for before, after in pairwise(places)) <= 11


def test_who_came_alone_has_not_hoarded_anything() -> None:
    policy = TierPolicy()
    alone = [Demand(1, 0.5, 1)]
    for _ in range(100):
        policy.granted(policy.turn(alone), alone)
    both = [Demand(0, 0.5, 1), Demand(1, 0.5, 1)]
    assert policy.turn(both) == 0


def test_tiers_are_in_order_and_the_last_is_the_default_unless_one_is_marked() -> None:
    base = TierSection(name="base", order=9, share=0.1)
    best = TierSection(name="max", order=1, ttft_ms=1500, tpot_ms=30, share=0.5)
    tiers = Tiers([base, best])
    assert tiers.names == ("max", "base")
    assert (tiers.default, tiers.last) == ("base", "base")
    marked = TierSection(name="pro", order=5, default=True)
    assert Tiers([base, best, marked]).default == "pro"
    standing = tiers.standing("max", priority=-3)
    assert (standing.tier, standing.place, standing.share) == ("max", (1, -3), 0.5)
    assert (standing.ttft_s, standing.tpot_s) == (1.5, 0.03)
    assert standing.with_ttft_left(1.0).ttft_s == 0.5
    assert standing.with_ttft_left(2.0).ttft_s == 0.0


def test_without_tiers_all_requests_stand_alike() -> None:
    tiers = Tiers()
    assert not tiers
    assert (tiers.default, tiers.names, tiers.last) == ("", (), "")
    assert tiers.standing("") == NO_TIER


@dataclass(frozen=True)
class Queued:
    standing: Standing
    number: int


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(1, 5))
def test_the_first_of_a_queue_are_those_of_each_tier_in_order(orders: list[int], size: int) -> None:
    queue = [Queued(Standing(order=order), number) for number, order in enumerate(sorted(orders))]
    found = first_of_tiers(queue, lambda item: (item.standing.order, item.number), size)
    assert list(found) == sorted(set(orders))
    for order, first in found.items():
        assert list(first) == [item for item in queue if item.standing.order == order][:size]


queues = st.lists(
    st.builds(
        TierTokens, st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.25]), st.integers(0, 999)
    ),
    max_size=4,
    unique_by=lambda tier: tier.order,
)


@given(queues, st.integers(0, 4))
def test_until_a_tier_is_computed_those_behind_get_their_shares_and_no_more(
    queue: list[TierTokens], order: int
) -> None:
    work = tokens_ahead(queue, order)
    ahead = sum(tier.num_tokens for tier in queue if tier.order <= order)
    behind = [tier for tier in queue if tier.order > order]
    assert work == pytest.approx(
        ahead + sum(min(tier.num_tokens, tier.share * work) for tier in behind)
    )
    assert ahead <= work <= sum(tier.num_tokens for tier in queue) + 1e-6


def test_a_share_of_everything_leaves_nothing_to_those_ahead() -> None:
    queue = [TierTokens(0, 0.0, 100), TierTokens(1, 1.0, 40)]
    assert tokens_ahead(queue, 0) == pytest.approx(140)
