"""Replays plan from rows that they do not measure, and advise what pays there."""

from collections.abc import Sequence

import numpy as np
import pytest

from experts.simulation import Cluster, Simulation, shared_numbers, simulate
from experts.time_model import TimeModel
from runtime.errors import ConfigError
from tests.experts.expert_load import skewed_trace


def replay(cluster: Cluster, redundant: Sequence[int] = (0,), /, **changes: object) -> Simulation:
    trace = skewed_trace(**changes)  # type: ignore[arg-type]
    return simulate(trace, cluster, redundant=redundant, model=TimeModel.of_trace(trace))


def test_skewed_prefill_gains_by_a_plan_and_more_by_redundant_experts() -> None:
    simulation = replay(Cluster(num_ranks=8), (0, 8), tokens=16_384, num_rows=6, skew=0.4)
    evenly, planned, _, redundant = simulation.outcomes
    assert [o.num_redundant for o in simulation.outcomes] == [0, 0, 8, 8]
    assert evenly.gain == 0.0
    assert 0.1 < planned.gain < redundant.gain
    assert planned.balancedness.overall > evenly.balancedness.overall
    assert redundant.moved is not None
    assert redundant.moved.num_bytes == redundant.moved.num_moves * 44_050_944
    assert redundant.redundant_bytes_per_rank == 3 * 44_050_944
    assert simulation.chosen is redundant
    assert redundant.expected_gain == pytest.approx(redundant.gain, abs=0.05)
    assert simulation.advice.startswith("plan with 8 redundant experts: +")
    assert (simulation.num_window_rows, simulation.num_measured_rows) == (3, 3)


def test_redundant_experts_of_decode_are_advised_against() -> None:
    """Each rank would read more weights, which is what decode on 8 ranks waits for."""
    simulation = replay(
        Cluster(num_ranks=8),
        (0, 32),
        num_layers=2,
        num_experts=256,
        tokens=4096,
        skew=3.0,
    )
    evenly, planned, _, redundant = simulation.outcomes
    assert redundant.gain < -0.05
    assert planned.gain >= evenly.gain
    assert "32 redundant experts do not pay" in simulation.advice


def test_by_rows_experts_become_even_where_time_would_leave_them() -> None:
    # A few tokens a pass: ranks wait for weights, so even rows bring nothing.
    trace = skewed_trace(tokens=64, num_rows=40, skew=1.0, role="decode")
    model = TimeModel.of_trace(trace)
    by_time, by_rows = (
        simulate(trace, Cluster(num_ranks=4), model=model, objective=objective)
        for objective in ("time", "rows")
    )
    evenly, left = by_time.outcomes
    assert left.refusal
    planned = by_rows.outcomes[1]
    assert planned.balancedness.overall > evenly.balancedness.overall + 0.1
    assert planned.moved is not None
    assert planned.moved.num_bytes == planned.moved.num_moves * trace.expert_bytes
    assert planned.gain < planned.moved.gain, "the one is time, the other rows"


def test_ranks_that_need_redundant_experts_are_compared_with_them() -> None:
    simulation = replay(Cluster(num_ranks=24, num_hosts=3), (16,), tokens=16_384)
    assert [o.num_redundant for o in simulation.outcomes] == [16, 16]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("skew", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("batch", [32, 64, 128])
def test_decode_on_8_ranks_never_loses_by_a_plan_on_rows_it_has_not_seen(
    seed: int, skew: float, batch: int
) -> None:
    # 256 experts, 8 a token: as many rows as a batch of DeepSeek-V3.
    simulation = replay(
        Cluster(num_ranks=8),
        seed=seed,
        num_layers=4,
        num_experts=256,
        tokens=4 * 8 * batch,
        num_rows=8,
        skew=skew,
        role="decode",
    )
    evenly, planned = simulation.outcomes
    assert planned.seconds_per_pass <= evenly.seconds_per_pass


def test_even_load_is_left_where_it_is() -> None:
    simulation = replay(Cluster(num_ranks=8), tokens=16_384, skew=1e6)
    evenly, planned = simulation.outcomes
    assert planned.refusal
    assert planned.moved is None
    assert planned.balancedness == evenly.balancedness
    assert evenly.balancedness.overall == pytest.approx(evenly.floor.overall, abs=0.01)
    assert simulation.advice.startswith("leave experts where they are: ")


@pytest.mark.parametrize(
    ("cluster", "redundant", "window", "field", "fix"),
    [
        (Cluster(num_ranks=0), 0, None, "--ranks", "1 or more"),
        (Cluster(num_ranks=5), 0, None, "--redundant", "3"),
        (Cluster(num_ranks=24), 32, None, "--redundant", "40"),
        (Cluster(num_ranks=8), -8, None, "--redundant", "0 or more"),
        (Cluster(num_ranks=8, num_hosts=3), 0, None, "--hosts", "a divisor"),
        (Cluster(num_ranks=8), 0, 4, "--window", "1 to 3"),
        (Cluster(num_ranks=8), 0, 0, "--window", "1 to 3"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    cluster: Cluster, redundant: int, window: int | None, field: str, fix: str
) -> None:
    trace, model = skewed_trace(), TimeModel.of_trace(skewed_trace())
    with pytest.raises(ConfigError) as caught:
        simulate(trace, cluster, redundant=(redundant,), model=model, num_window_rows=window)
    assert (caught.value.path, caught.value.fix) == (field, fix)


def test_of_several_numbers_each_has_its_plan_and_the_first_is_dealt_evenly_too() -> None:
    simulation = replay(Cluster(num_ranks=8), (0, 8, 16), tokens=16_384, skew=0.4)
    kinds = [(o.num_redundant, o.is_planned) for o in simulation.outcomes]
    assert kinds == [(0, False), (0, True), (8, True), (16, True)]


def test_the_choice_is_made_by_the_rows_that_were_planned_from() -> None:
    # Skewed while it is planned from, even while it is measured.
    skewed = skewed_trace(tokens=16_384, num_rows=4, skew=0.3).counts_NLE
    even = skewed_trace(tokens=16_384, num_rows=4, skew=1e6).counts_NLE
    counts_NLE = np.concatenate([skewed, even])
    simulation = replay(
        Cluster(num_ranks=8), (0, 8), counts_NLE=counts_NLE, tokens_N=np.full(8, 16_384)
    )
    assert simulation.chosen_redundant == 8
    assert simulation.chosen.gain < 0.05 < simulation.chosen.expected_gain


def test_no_redundant_expert_is_chosen_where_none_brings_more() -> None:
    simulation = replay(Cluster(num_ranks=8), (0, 8, 16), tokens=16_384, skew=1e6)
    assert simulation.chosen_redundant == 0


def test_numbers_are_those_that_ranks_can_share() -> None:
    assert shared_numbers(256, 8, 0, 32) == (0, 8, 16, 24, 32)
    assert shared_numbers(256, 72, 0, 32) == (32,)
    assert shared_numbers(256, 72, 0, 31) == ()
    assert shared_numbers(256, 72, 33, 200) == (104, 176)
    assert shared_numbers(256, 8) == (0, 8, 16, 32, 64, 128, 256)
    assert shared_numbers(256, 72) == (32, 104, 176)


def test_an_empty_trace_is_refused() -> None:
    trace = skewed_trace(counts_NLE=np.zeros((4, 3, 32), np.int64))
    with pytest.raises(ConfigError, match="nothing was recorded"):
        simulate(trace, Cluster(num_ranks=8), model=TimeModel.of_trace(trace))
