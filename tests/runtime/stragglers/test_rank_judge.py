"""Who looks again and again finds a 5 % straggler in the noise of GPUs, and nothing beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.ranks.detection import CASES, places_of
from bench.ranks.played import Fault, Timing
from bench.ranks.watched import DIFFER, LOOKS, WANDER, WatchedRanks, found_after, quiet
from runtime.stragglers.rank_judge import RankJudge
from runtime.stragglers.rank_waits import WaitWindow, joined_in_time
from runtime.stragglers.slow_ranks import SlowKind

AS_RECORDED = replace(Timing(), differ=DIFFER, wander=WANDER, rank_spread=0.0)
"""Of four H200, 2026-11-26."""
STRAGGLER = next(case for case in CASES if case.name == "attention +5 %")


@pytest.mark.nightly
def test_a_straggler_of_5_percent_is_found_in_the_noise_of_four_gpus() -> None:
    after_100, _, after_300 = found_after(STRAGGLER, 20, 4, AS_RECORDED, seed=3)
    assert after_100 >= 0.5
    assert after_300 >= 0.9


def test_and_mostly_in_100_steps_where_blocks_vary_by_a_third_less() -> None:
    timing = replace(AS_RECORDED, wander=WANDER * 2 / 3)
    after_100, *_ = found_after(STRAGGLER, 20, 4, timing, seed=3)
    assert after_100 >= 0.85


def test_ranks_that_wander_give_no_alarm() -> None:
    looks, alarms = quiet(80, 4, AS_RECORDED, seed=9)
    assert looks >= 80
    assert alarms == 0


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("wander", [0.012, WANDER, 0.03])
def test_ranks_that_wander_for_an_hour_give_no_alarm(wander: float) -> None:
    assert quiet(LOOKS, 4, replace(AS_RECORDED, wander=wander), seed=21)[1] == 0


def test_a_fault_that_lasts_stays_found_and_one_that_ends_is_forgotten() -> None:
    groups = WatchedRanks(4, 4, AS_RECORDED, seed=5)
    for _ in range(12):
        groups.look()
    groups.break_down(Fault(ranks=(1,), attention=1.1))
    lasting = [[places_of(found) for found in groups.look()] for _ in range(15)]
    sender = (SlowKind.SENDER, 1, -1)
    assert np.mean([sender in places for look in lasting[3:] for places in look]) > 0.95
    groups.break_down(Fault())
    for _ in range(3):
        groups.look()
    assert not any(places_of(found) for found in groups.look())


def test_looking_twice_at_the_same_steps_says_the_same(window: WaitWindow) -> None:
    judge = RankJudge()
    first = judge.look(window)
    assert places_of(judge.look(window)) == places_of(first)


@pytest.fixture
def window() -> WaitWindow:
    groups = WatchedRanks(1, 4, Timing(), seed=1)
    groups.break_down(Fault(ranks=(2,), attention=1.1))
    groups.look()
    (seen,) = groups.seen
    assert seen is not None
    return seen


def test_windows_join_and_part(window: WaitWindow) -> None:
    behind = replace(window, first_block=5, own_s=window.own_s + 1.0)
    both = joined_in_time(window, behind)
    assert both.own_s.shape[0] == 10
    assert both.newest(5).first_block == 5
    assert (both.newest(5).own_s == behind.own_s).all()
    halves = both.joined(2)
    assert halves.own_s.shape[0] == 5
    assert halves.own_s[0] == pytest.approx(window.own_s[:2].mean(axis=0))
