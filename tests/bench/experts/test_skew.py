"""The synthetic skew is like the published one, and a plan of one window holds in the next."""

import numpy as np
import pytest

from bench.experts.skew import skewed_windows
from experts.simulation import Cluster, simulate
from experts.time_model import TimeModel

pytestmark = pytest.mark.nightly


def test_the_skew_is_that_of_the_published_case() -> None:
    """0.39 on 32 ranks, single experts with 10.9 times the mean, over 58 layers."""
    trace = skewed_windows(role="decode", tokens=4096, num_rows=2)
    simulation = simulate(
        trace, Cluster(num_ranks=32), redundant=(0, 32), model=TimeModel.of_trace(trace)
    )
    evenly, _, _, planned = simulation.outcomes
    assert abs(evenly.balancedness.overall - 0.39) < 0.03
    rows_LE = trace.counts_NLE[0]
    hottest = float((rows_LE.max(axis=1) / rows_LE.mean(axis=1)).mean())
    assert 8 < hottest - 1 < 16
    # One window, 32 redundant experts: at least 97 % of the noise floor in the next window.
    assert planned.balancedness.overall >= 0.97 * planned.floor.overall


def test_skewed_prefill_on_8_ranks_gains_30_percent_without_redundant_experts_and_with_32() -> None:
    trace = skewed_windows(role="prefill", tokens=16_384, num_rows=2, num_layers=12)
    model = TimeModel.of_trace(trace)
    evenly, planned, _, redundant = simulate(
        trace, Cluster(num_ranks=8), redundant=(0, 32), model=model
    ).outcomes
    assert planned.gain >= 0.3
    assert redundant.gain >= 0.3
    assert planned.balancedness.overall >= 0.97 * planned.floor.overall
    assert evenly.gain == 0.0


def test_a_seed_gives_the_same_trace_again() -> None:
    first, again = (
        skewed_windows(role="decode", tokens=64, num_layers=2, num_rows=1) for _ in range(2)
    )
    assert np.array_equal(first.counts_NLE, again.counts_NLE)
