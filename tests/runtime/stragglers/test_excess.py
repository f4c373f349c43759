"""Thresholds follow from how seldom there may be an alarm for nothing."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.stragglers.excess import EARLIER_WINDOWS, Judge, Limits, WindowNoise, deviations
from runtime.stragglers.robust import (
    block_noise,
    deviation_of_middle,
    middle_mean,
    student_quantile,
)

LIMITS = Limits(ratio=0.0, differ=0.0, spreads=0.0)


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize(
    ("normal_deviation", "degrees", "expected"),
    # Of tables of Student's distribution: one-sided 0.00135 (3 deviations) and 2.87e-7 (5).
    [(3.0, 30, 3.267), (3.0, 120, 3.063), (5.0, 60, 5.594), (5.0, 120, 5.283)],
)
def test_an_estimated_noise_needs_more_deviations(
    normal_deviation: float, degrees: float, expected: float
) -> None:
    assert student_quantile(normal_deviation, degrees) == pytest.approx(expected, rel=0.01)


def test_more_figures_and_less_knowledge_need_more_deviations() -> None:
    assert deviations(20, 1e9) == pytest.approx(4.96, abs=0.02)
    assert deviations(20, 132) > deviations(20, 1e9)
    assert deviations(2000, 132) > deviations(20, 132)


@pytest.mark.parametrize("count", [5, 10, 20])
def test_the_middle_varies_as_it_is_said(count: int) -> None:
    middles = middle_mean(normal(20_000, count), 1)
    assert middles.std() == pytest.approx(deviation_of_middle(count), rel=0.03)


def test_noise_of_blocks_is_that_of_one_block_and_a_pause_is_none() -> None:
    noises = [block_noise(normal(5, 8, seed=seed)) for seed in range(300)]
    assert np.median(noises) == pytest.approx(1.0, rel=0.05)
    figures = normal(5, 8)
    paused = figures.copy()
    paused[2, 3] += 1000.0
    assert block_noise(paused) < 2.0 * block_noise(figures)


def test_a_fifth_of_the_values_does_not_move_the_middle() -> None:
    values = np.arange(20.0)
    moved = values.copy()
    moved[-4:] = 1e9
    assert middle_mean(moved, 0) == middle_mean(values, 0)


def judged(more: float, earlier: list[WindowNoise], *, seed: int) -> bool:
    figures = 100.0 + normal(5, 4, seed=seed)
    figures[:, 2] += more
    return bool(Judge(4, LIMITS, earlier).ranks("own", figures).is_found[2])


def earlier_noise(count: int, *, wander: float = 0.0) -> list[WindowNoise]:
    found = []
    for seed in range(count):
        judge = Judge(4, LIMITS, [])
        drift = wander * normal(1, 4, seed=1000 + seed)
        judge.ranks("own", 100.0 + normal(5, 4, seed=500 + seed) + drift)
        found.append(judge.noise)
    return found


def test_who_knows_the_noise_of_before_finds_less() -> None:
    """3.4 of a block's deviations are 6.3 of what the middle of five varies by beside others."""
    seeds = range(200)
    alone = np.mean([judged(3.4, [], seed=seed) for seed in seeds])
    known = np.mean([judged(3.4, earlier_noise(10), seed=seed) for seed in seeds])
    assert known > 0.8
    assert known > alone + 0.15
    few = np.mean([judged(3.4, earlier_noise(EARLIER_WINDOWS - 1), seed=seed) for seed in seeds])
    assert few == alone


def test_what_wanders_between_windows_is_noise_too() -> None:
    steady, wandering = earlier_noise(10), earlier_noise(10, wander=3.0)
    assert judged(4.0, steady, seed=3)
    assert not judged(4.0, wandering, seed=3)


def test_a_window_that_is_noisier_than_those_before_makes_its_own_threshold() -> None:
    quiet = earlier_noise(10)
    figures = 100.0 + 20.0 * normal(5, 4, seed=8)
    assert not Judge(4, LIMITS, quiet).ranks("own", figures).is_found.any()
