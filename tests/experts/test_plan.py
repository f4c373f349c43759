"""Plans keep every expert standing, move little, never lose by the model, and refuse to no use."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.affinity import join_pairs
from experts.balance import balance_layers
from experts.balancedness import balancedness_of, copies_of, even_placement, rank_rows
from experts.plan import Terms, plan_placement
from experts.rearrange import keep_slots, rearrange
from experts.time_model import TimeModel
from runtime.errors import ConfigError
from tests.experts.expert_load import even, skewed_trace

SIZES = st.sampled_from([(2, 0), (4, 0), (4, 8), (8, 0), (8, 8), (8, 16)])
"""Ranks, and slots beyond 32 experts."""


def balancedness(load_LE: np.ndarray, placement_LP: np.ndarray, num_ranks: int) -> float:
    return balancedness_of(rank_rows(load_LE[None], placement_LP, num_ranks)).overall


def twins(placement_LP: np.ndarray, num_ranks: int) -> int:
    """How many slots hold an expert that their rank has already."""
    held = np.sort(placement_LP.reshape(len(placement_LP), num_ranks, -1), axis=2)
    return int((held[..., 1:] == held[..., :-1]).sum())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=SIZES,
    skew=st.sampled_from([0.1, 0.5, 2.0]),
    groups=st.sampled_from([1, 8]),
)
def test_few_moves_leave_every_expert_standing_and_ranks_no_less_even(
    seed: int, size: tuple[int, int], skew: float, groups: int
) -> None:
    ranks, redundant = size
    trace = skewed_trace(seed, skew=skew)
    load = trace.counts_NLE.sum(axis=0).astype(float)
    now = even(trace, 32 + redundant, ranks)
    then = rearrange(now, load, num_ranks=ranks, num_groups=groups)
    assert (copies_of(then, 32) >= 1).all()
    assert twins(then, ranks) == 0
    assert balancedness(load, then, ranks) >= balancedness(load, now, ranks) - 1e-9


def test_few_moves_are_a_tenth_of_a_fresh_placements() -> None:
    trace = skewed_trace(num_layers=8, num_experts=256)
    load = trace.counts_NLE.sum(axis=0).astype(float)
    now = even(trace, 256, 8)
    few = rearrange(now, load, num_ranks=8)
    fresh = keep_slots(now, balance_layers(load[None], num_slots=256, num_ranks=8), num_ranks=8)
    assert balancedness(load, few, 8) > 0.98
    assert (few != now).sum() < 0.12 * (fresh != now).sum()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), size=SIZES, hosts=st.sampled_from([1, 2]))
def test_kept_slots_have_the_same_load_by_rank_and_never_more_moves(
    seed: int, size: tuple[int, int], hosts: int
) -> None:
    ranks, redundant = size
    before, after = skewed_trace(seed), skewed_trace(seed + 1)
    slots = 32 + redundant
    loads = [trace.counts_NLE.sum(axis=0).astype(float)[None] for trace in (before, after)]
    now, fresh = (balance_layers(load, num_slots=slots, num_ranks=ranks) for load in loads)
    kept = keep_slots(now, fresh, num_ranks=ranks, num_hosts=hosts)
    assert (kept != now).sum() <= (fresh != now).sum()
    assert np.array_equal(copies_of(kept, 32), copies_of(fresh, 32))
    by_host = (3, hosts, -1)
    sums = [
        np.sort(rank_rows(after.counts_NLE, placed, ranks)[0].reshape(by_host), axis=2)
        for placed in (kept, fresh)
    ]
    assert np.allclose(*sums)


def test_nothing_moves_for_a_placement_that_only_has_other_names() -> None:
    now = np.array([[0, 1, 2, 3, 4, 5, 6, 7]])
    renamed = np.array([[7, 6, 4, 5, 2, 3, 1, 0]])
    assert np.array_equal(keep_slots(now, renamed, num_ranks=4), now)
    # Across hosts a rank is not the same.
    across = keep_slots(now, renamed, num_ranks=4, num_hosts=2)
    assert set(across[0, :4].tolist()) == {4, 5, 6, 7}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=SIZES,
    tokens=st.sampled_from([8, 256, 8192]),
    hosts=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 4]),
)
def test_no_plan_is_slower_than_standing_still(
    seed: int, size: tuple[int, int], tokens: int, hosts: int, groups: int
) -> None:
    ranks, redundant = size
    trace = skewed_trace(seed, tokens=tokens, num_groups=groups, topk_group=(groups + 1) // 2)
    model = TimeModel.of_trace(trace)
    now = even(trace, 32 + redundant, ranks)
    plan = plan_placement(trace, now, num_ranks=ranks, num_hosts=hosts, model=model)
    before, after = (
        model.layer_seconds(trace.counts_NLE, placed, num_ranks=ranks, num_hosts=hosts)
        for placed in (now, plan.target_LP)
    )
    assert (after <= before * (1 + 1e-9)).all()
    assert plan.expectation.gain >= 0
    assert bool(plan.refusal) == (not plan.rounds)
    if plan.refusal:
        assert np.array_equal(plan.target_LP, now)
    else:
        assert before.sum() / after.sum() - 1 == pytest.approx(plan.expectation.gain)
        assert plan.expectation.gain >= Terms().min_gain
    replayed = now.copy()
    for move in (move for moves in plan.rounds for move in moves):
        replayed[move.layer, move.slot] = move.expert
    assert np.array_equal(replayed, plan.target_LP)
    assert plan.expectation.num_bytes == plan.expectation.num_moves * trace.expert_bytes


def test_skewed_prefill_gains_and_says_what_it_takes() -> None:
    trace = skewed_trace(tokens=16_384)
    plan = plan_placement(trace, even(trace, 32, 8), num_ranks=8, model=TimeModel.of_trace(trace))
    expected = plan.expectation
    assert plan.refusal == ""
    assert expected.gain > 0.15
    assert expected.balancedness_after > expected.balancedness_before + 0.1
    assert expected.worst_layer_after > expected.worst_layer_before
    assert expected.num_moves == sum(map(len, plan.rounds))
    assert expected.num_rounds == len(plan.rounds)


def test_decode_that_waits_for_weights_is_left_as_it_is() -> None:
    """Sixteen rows an expert, far below 161: even rows bring nothing but a little of the way."""
    trace = skewed_trace(num_layers=2, num_experts=256, tokens=2048, skew=3.0)
    now = even(trace, 256, 8)
    plan = plan_placement(trace, now, num_ranks=8, model=TimeModel.of_trace(trace))
    assert "waits for weights" in plan.refusal or "a plan must bring" in plan.refusal
    assert plan.rounds == ()
    assert np.array_equal(plan.target_LP, now)


def test_moves_that_take_longer_than_they_save_are_refused() -> None:
    trace = skewed_trace(tokens=16_384)
    now, model = even(trace, 32, 8), TimeModel.of_trace(trace)
    patient, hasty = (
        plan_placement(trace, now, num_ranks=8, model=model, terms=Terms(horizon_passes=passes))
        for passes in (2000, 1)
    )
    assert patient.refusal == ""
    assert hasty.expectation.num_moves < patient.expectation.num_moves


def test_a_pass_that_is_mostly_something_else_is_not_worth_a_plan() -> None:
    trace = skewed_trace(tokens=16_384)
    model = TimeModel.of_trace(trace, other_s_per_pass=10.0)
    plan = plan_placement(trace, even(trace, 32, 8), num_ranks=8, model=model)
    assert "a plan must bring +1.0%" in plan.refusal
    assert plan.expectation.num_moves > 0


def test_pairs_come_to_one_host_and_ranks_stay_even() -> None:
    generator = np.random.default_rng(0)
    partner = generator.permutation(32)
    pairs = np.zeros((1, 32, 32), np.int64)
    for one, other in zip(partner[::2], partner[1::2], strict=True):
        pairs[0, one, other] = pairs[0, other, one] = 100
    load = np.full((1, 32), 100.0)
    now = even_placement(32, 32, 8)[None]
    joined = join_pairs(now, load, pairs, num_ranks=8, num_hosts=2)
    model = TimeModel.of_trace(skewed_trace())
    together = [float(model.together(load, placed, 2, pairs)[0]) for placed in (now, joined)]
    assert together[0] < 0.7
    assert together[1] == 1.0
    assert balancedness(load, joined, 8) == 1.0
    assert sorted(joined[0].tolist()) == list(range(32))


@pytest.mark.parametrize(
    ("placement", "ranks", "hosts", "field"),
    [
        (np.zeros((2, 32), np.int64), 8, 1, "current_LP"),
        (np.zeros((3, 32), np.int64), 8, 1, "current_LP"),
        (np.tile(np.arange(32), (3, 1)) + 1, 8, 1, "current_LP"),
        (np.tile(np.arange(32), (3, 1)), 5, 1, "num_physical_experts"),
        (np.tile(np.arange(32), (3, 1)), 8, 3, "num_ranks"),
    ],
)
def test_what_does_not_fit_is_refused(
    placement: np.ndarray, ranks: int, hosts: int, field: str
) -> None:
    trace = skewed_trace()
    with pytest.raises(ConfigError) as caught:
        plan_placement(
            trace, placement, num_ranks=ranks, num_hosts=hosts, model=TimeModel.of_trace(trace)
        )
    assert caught.value.path == field
