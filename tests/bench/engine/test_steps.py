"""Steps run in the loop that serves, for as long as was asked, and end by everybody's word."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.engine.report import Report
from bench.engine.requests import RunningRequests, SamplingChoice
from bench.engine.steps import BenchSteps, LoopPlace, measure_steps
from bench.engine.timing import StepClock, StepTimes
from engine.parallel.lockstep import GroupState, RankState, SoloLockstep
from engine.pending_step import StepResult
from engine.request import ScheduledRequest
from engine.sampling.inputs import SampledToken
from runtime.errors import PeerLostError, TandemError


class FakeRunner:
    """Steps that are over when they are collected; counts how many are unread at a launch."""

    def __init__(self, fails_at: int = -1, *, books_meanwhile: bool = False) -> None:
        self.num_launched = self.num_unread = self.most_unread = self.num_dummies = 0
        self.means: set[int] = set()
        self._fails_at, self._books_meanwhile = fails_at, books_meanwhile

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        after: Any,
        group_mean: int,
        meanwhile: Callable[[], None],
    ) -> Any:
        if self.num_launched == self._fails_at:
            raise PeerLostError("another rank was lost")
        assert (after is not None) == (self.num_unread > 0)
        if self._books_meanwhile:
            meanwhile()
        self.num_launched += 1
        self.num_unread += 1
        self.means.add(group_mean)
        self.most_unread = max(self.most_unread, self.num_unread)

        def collect() -> list[StepResult]:
            self.num_unread -= 1
            token = SampledToken(1)
            return [StepResult(request=item.request, sampled=token) for item in scheduled]

        return SimpleNamespace(
            collect_sampled=lambda: None, collect=collect, span=None, idle_s=None, is_done=True
        )

    def run_dummy(self, group_mean: int) -> None:
        self.num_dummies += 1
        self.means.add(group_mean)


class ScriptedGroup:
    """The other rank runs so many requests, and leaves after so many meetings."""

    is_group = True

    def __init__(self, num_tokens: int, num_meetings: int) -> None:
        self._num_tokens, self._left = num_tokens, num_meetings

    def exchange(self, state: RankState) -> GroupState:
        self._left -= 1
        return GroupState(
            has_work=True,
            max_num_tokens=max(state.num_tokens, self._num_tokens),
            mean_num_tokens=-(-(state.num_tokens + self._num_tokens) // 2),
            all_leaving=state.leaving and self._left <= 0,
            in_flight=True,
            any_leaving=state.leaving,
        )


def requests(count: int) -> RunningRequests:
    return RunningRequests(
        [5] * count,
        output_len=3,
        block_size=8,
        sampling=SamplingChoice(temperature=1.0, top_p=1.0, vocab_size=100),
        generator=random.Random(1),
    )


def place(max_ahead: int) -> LoopPlace:
    return LoopPlace(rank=0, num_ranks=1, device=torch.device("cpu"), max_ahead=max_ahead)


def ticking() -> StepClock:
    """Every step takes a second."""
    moments = iter(range(10**9))
    return StepClock(lambda: float(next(moments)))


@pytest.mark.parametrize("max_ahead", [0, 1])
def test_a_rank_runs_until_there_is_enough(max_ahead: int) -> None:
    runner, times = FakeRunner(), StepTimes(warm_up_s=2.0, seconds=40.0)
    begun, left, looks = [], [], []

    def look() -> Report:
        looks.append(runner.num_launched)
        return {"at": len(looks)}

    driver = BenchSteps(
        requests(4),
        runner,
        times,
        begin_step=lambda: begun.append(1),
        announce=lambda scheduled: begun.append(len(scheduled)),
        dismiss=lambda: left.append(1),
        clock=ticking(),
    )
    seen = measure_steps(driver, times, SoloLockstep(), place(max_ahead), look=look)
    found = times.result()
    assert seen == [{"at": 1}, {"at": 2}]
    assert looks[0] > 0, "the load was there when they looked"
    assert found.seconds >= 40.0
    assert set(found.step_s) == {1.0}, "no step is shorter than it was, not the last either"
    assert found.per_s(4) == 4.0
    assert 5 <= found.mean_context < 8
    assert runner.most_unread == 1 + max_ahead
    assert runner.num_unread == 0, "all that was launched was read"
    assert begun.count(1) == begun.count(4) == runner.num_launched
    assert left == [1]


def test_a_step_that_is_booked_in_the_middle_of_a_launch_has_its_own_end() -> None:
    runner, times = FakeRunner(books_meanwhile=True), StepTimes(warm_up_s=0.0, seconds=20.0)
    driver = BenchSteps(requests(2), runner, times, clock=ticking())
    measure_steps(driver, times, SoloLockstep(), place(1))
    assert set(times.result().step_s) == {1.0}
    assert runner.most_unread == 1


def test_a_rank_without_requests_joins_until_the_others_leave() -> None:
    runner, times = FakeRunner(), StepTimes(warm_up_s=0.0, seconds=1.0)
    driver = BenchSteps(requests(0), runner, times, clock=ticking())
    assert not driver.has_requests
    assert measure_steps(driver, times, ScriptedGroup(7, 20), place(1), look=dict) == []
    assert runner.num_launched == 0
    assert runner.num_dummies >= 20
    assert runner.means == {4}


def test_a_step_that_fails_ends_the_measurement() -> None:
    times = StepTimes(warm_up_s=0.0, seconds=1e9)
    driver = BenchSteps(requests(2), FakeRunner(fails_at=30), times, clock=ticking())
    with pytest.raises(TandemError):
        measure_steps(driver, times, SoloLockstep(), place(0), look=dict)
    assert not [thread for thread in threading.enumerate() if thread.name == "engine-loop"]
