"""Replays plan from rows that they do not measure, and advise what pays there."""

import numpy as np
import pytest

from engine.experts.simulation import Cluster, Simulation, simulate
from engine.experts.time_model import TimeModel
from runtime.errors import ConfigError
from tests.engine.experts.expert_load import skewed_trace


def replay(cluster: Cluster, **changes: object) -> Simulation:
    trace = skewed_trace(**changes)  # type: ignore[arg-type]
    return simulate(trace, cluster, model=TimeModel.of_trace(trace))


def test_skewed_prefill_gains_by_a_plan_and_more_by_redundant_experts() -> None:
    simulation = replay(Cluster(num_ranks=8, num_redundant=8), tokens=16_384, num_rows=6, skew=0.4)
    evenly, planned, _, redundant = simulation.outcomes
    assert [o.num_redundant for o in simulation.outcomes] == [0, 0, 8, 8]
    assert evenly.gain == 0.0
    assert 0.1 < planned.gain < redundant.gain
    assert planned.balancedness.overall > evenly.balancedness.overall
    assert redundant.num_bytes == redundant.num_moves * 44_050_944
    assert simulation.redundant_bytes_per_rank == 3 * 44_050_944
    assert simulation.advice.startswith("plan with 8 redundant experts: +")
    assert (simulation.num_window_rows, simulation.num_measured_rows) == (3, 3)


def test_redundant_experts_of_decode_are_advised_against() -> None:
    """Each rank would read more weights, which is what decode on 8 ranks waits for."""
    simulation = replay(
        Cluster(num_ranks=8, num_redundant=32),
        num_layers=2,
        num_experts=256,
        tokens=4096,
        skew=3.0,
    )
    evenly, planned, _, redundant = simulation.outcomes
    assert redundant.gain < -0.05
    assert planned.gain >= evenly.gain
    assert "32 redundant experts do not pay" in simulation.advice


def test_ranks_that_need_redundant_experts_are_compared_with_them() -> None:
    simulation = replay(Cluster(num_ranks=24, num_redundant=16, num_hosts=3), tokens=16_384)
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
    assert planned.num_moves == 0
    assert planned.balancedness == evenly.balancedness
    assert evenly.balancedness.overall == pytest.approx(evenly.floor.overall, abs=0.01)
    assert simulation.advice.startswith("leave experts where they are: ")


@pytest.mark.parametrize(
    ("cluster", "window", "field", "fix"),
    [
        (Cluster(num_ranks=0), None, "--ranks", "1 or more"),
        (Cluster(num_ranks=5), None, "--redundant", "3"),
        (Cluster(num_ranks=24, num_redundant=32), None, "--redundant", "40"),
        (Cluster(num_ranks=8, num_redundant=-8), None, "--redundant", "0 or more"),
        (Cluster(num_ranks=8, num_hosts=3), None, "--hosts", "a divisor"),
        (Cluster(num_ranks=8), 4, "--window", "1 to 3"),
        (Cluster(num_ranks=8), 0, "--window", "1 to 3"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    cluster: Cluster, window: int | None, field: str, fix: str
) -> None:
    trace = skewed_trace()
    with pytest.raises(ConfigError) as caught:
        simulate(trace, cluster, model=TimeModel.of_trace(trace), num_window_rows=window)
    assert (caught.value.path, caught.value.fix) == (field, fix)


def test_an_empty_trace_is_refused() -> None:
    trace = skewed_trace(counts_NLE=np.zeros((4, 3, 32), np.int64))
    with pytest.raises(ConfigError, match="nothing was recorded"):
        simulate(trace, Cluster(num_ranks=8), model=TimeModel.of_trace(trace))
