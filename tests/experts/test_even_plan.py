"""Plans by rows: few moves, and no layer that is less even behind them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.balance import balance_layers
from experts.balancedness import balancedness_of, copies_of, rank_rows
from experts.even_plan import even_rounds, plan_even_rows
from experts.moves import order_moves
from experts.windows import LoadWindow
from tests.experts.expert_load import even, skewed_trace
from tests.experts.test_moves import replay

SIZES = st.sampled_from([(2, 0), (4, 0), (4, 8), (8, 0), (8, 8)])
"""Ranks, and slots beyond 32 experts."""


def fullest(counts_NLE: np.ndarray, placement_LP: np.ndarray, num_ranks: int) -> np.ndarray:
    """[L]: rows of the fullest rank, over all passes."""
    rows_L: np.ndarray = rank_rows(counts_NLE, placement_LP, num_ranks).max(axis=2).sum(axis=0)
    return rows_L


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=SIZES,
    skew=st.sampled_from([0.1, 0.5, 2.0]),
    num_rows=st.integers(1, 5),
)
def test_no_layer_is_less_even_and_every_expert_stands(
    seed: int, size: tuple[int, int], skew: float, num_rows: int
) -> None:
    ranks, redundant = size
    trace = skewed_trace(seed, skew=skew, num_rows=num_rows)
    now_LP = even(trace, 32 + redundant, ranks)
    plan = plan_even_rows(trace.counts_NLE, now_LP, num_ranks=ranks, min_gain=0.0)
    assert (copies_of(plan.target_LP, 32) >= 1).all()
    before_L, after_L = (
        fullest(trace.counts_NLE, placed_LP, ranks) for placed_LP in (now_LP, plan.target_LP)
    )
    assert (after_L <= before_L + 1e-6).all()
    assert plan.expectation.gain == pytest.approx(before_L.sum() / after_L.sum() - 1)
    np.testing.assert_array_equal(replay(now_LP, plan.rounds, ranks), plan.target_LP)


def test_experts_stay_where_they_are_as_far_as_that_goes() -> None:
    """Rows of a placement computed afresh are no more even, and nearly all experts move for it."""
    trace = skewed_trace(num_layers=8, num_experts=256, skew=0.7)
    now_LP = even(trace, 256, 8)
    plan = plan_even_rows(trace.counts_NLE, now_LP, num_ranks=8, min_gain=0.01)
    after = balancedness_of(rank_rows(trace.counts_NLE, plan.target_LP, 8))
    fresh_LP = balance_layers(
        trace.counts_NLE.sum(axis=0)[None].astype(float), num_slots=256, num_ranks=8
    )
    fresh = balancedness_of(rank_rows(trace.counts_NLE, fresh_LP, 8))
    assert after.overall > fresh.overall - 0.02
    _, rounds = order_moves(now_LP, fresh_LP, num_ranks=8)
    assert plan.expectation.num_moves < 0.2 * sum(map(len, rounds))


def test_what_a_move_of_an_even_placement_brings_is_nothing() -> None:
    trace = skewed_trace(skew=0.3)
    counts_NLE = trace.counts_NLE
    first = plan_even_rows(counts_NLE, even(trace, 32, 4), num_ranks=4, min_gain=0.01)
    again = plan_even_rows(counts_NLE, first.target_LP, num_ranks=4, min_gain=0.01)
    assert first.rounds
    assert not first.refusal
    assert not again.rounds
    assert again.refusal
    np.testing.assert_array_equal(again.target_LP, first.target_LP)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_where_nothing_was_counted_nothing_moves(num_rows: int) -> None:
    trace = skewed_trace()
    nothing_NLE = np.zeros((num_rows, *trace.counts_NLE.shape[1:]), np.int64)
    plan = plan_even_rows(nothing_NLE, even(trace, 32, 4), num_ranks=4, min_gain=0.0)
    assert not plan.rounds
    assert plan.expectation.gain == 0.0


def test_a_running_instance_is_told_the_rounds_of_its_window() -> None:
    counts_LE = np.array([[10, 9, 1, 1]])
    load = LoadWindow(first_pass=0, end_pass=1, counts_LE=counts_LE)
    table = np.array([[0, 1, 2, 3]])
    assert not even_rounds(load, table, num_ranks=2, min_gain=0.9)
    rounds = even_rounds(load, table, num_ranks=2, min_gain=0.5)
    assert rounds
    plan = plan_even_rows(counts_LE[None], table, num_ranks=2, min_gain=0.5)
    assert list(rounds) == list(plan.rounds)
    assert plan.expectation.gain == pytest.approx(19 / 11 - 1)
