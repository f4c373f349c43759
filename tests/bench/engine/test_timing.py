"""Rates are whole steps over the time that they took, whoever read them when."""

from itertools import accumulate
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engine.report import Quantiles
from bench.engine.timing import MIN_STEPS, MIN_WARM_UPS, MOST_TIMES, StepClock, StepTimes

DISTANCES = st.lists(st.floats(1e-4, 10.0), min_size=MIN_WARM_UPS + MIN_STEPS + 1, max_size=60)


class FakeSpan:
    """A step that ended at ``end`` on the device."""

    def __init__(self, end: float) -> None:
        self.end = end

    def ended_after(self, before: Self) -> float:
        return self.end - before.end


def gather(distances: list[float], *, warm_up_s: float, seconds: float) -> StepTimes:
    times = StepTimes(warm_up_s=warm_up_s, seconds=seconds)
    for moment in accumulate(distances):
        times.add(moment, num_requests=2, num_positions=30, num_tokens=5, idle_s=0.001)
    return times


@given(DISTANCES)
def test_what_is_measured_are_whole_steps(distances: list[float]) -> None:
    times = gather(distances, warm_up_s=0.0, seconds=1e-6)
    assert times.began.is_set()
    assert times.enough.is_set()
    found = times.result()
    assert list(found.step_s) == pytest.approx(distances[MIN_WARM_UPS:], abs=1e-9)
    assert found.num_steps == len(distances) - MIN_WARM_UPS
    assert found.seconds == pytest.approx(sum(found.step_s))
    assert found.per_s(7.0) * found.seconds == pytest.approx(7.0 * found.num_steps)
    assert found.mean_context == 15.0
    assert found.tokens_each == 2.5
    assert len(found.idle_s) == found.num_steps


def test_as_many_steps_are_measured_and_as_much_awaited_as_was_asked() -> None:
    over = False
    times = StepTimes(warm_up_s=0.0, seconds=1.0, min_steps=5, is_over=lambda: over)
    for second in range(MIN_WARM_UPS + 6):
        times.add(float(second))
        assert not times.enough.is_set()
    over = True
    times.add(9.0)
    assert times.enough.is_set()
    found = times.result()
    assert (found.first_step, found.num_steps) == (MIN_WARM_UPS, 7)


def test_what_never_comes_is_not_awaited_for_ever() -> None:
    times = StepTimes(warm_up_s=0.0, seconds=1.0, is_over=lambda: False)
    for second in range(MIN_WARM_UPS + MOST_TIMES + 1):
        times.add(float(second))
    assert times.enough.is_set()


@given(DISTANCES, st.floats(0.0, 20.0), st.floats(0.01, 20.0))
def test_it_is_enough_when_it_lasted_as_long_as_was_asked(
    distances: list[float], warm_up_s: float, seconds: float
) -> None:
    times = StepTimes(warm_up_s=warm_up_s, seconds=seconds)
    moments = list(accumulate(distances))
    began = None
    for index, moment in enumerate(moments):
        times.add(moment)
        if began is None and times.began.is_set():
            began = index
            assert moment - moments[0] >= warm_up_s
            assert index >= MIN_WARM_UPS - 1
        is_long = began is not None and moment - moments[began] >= seconds
        is_counted = began is not None and index - began >= MIN_STEPS
        assert times.enough.is_set() == (is_long and is_counted)
        if times.enough.is_set():
            assert times.result().seconds >= seconds


def test_too_little_is_no_result() -> None:
    with pytest.raises(AssertionError):
        gather([1.0] * 4, warm_up_s=0.0, seconds=100.0).result()


@given(
    st.lists(st.floats(0.01, 1.0), min_size=3, max_size=20),
    st.lists(st.floats(0.0, 100.0), min_size=20, max_size=20),
)
def test_a_device_tells_when_steps_ended_whoever_was_late(
    distances: list[float], host: list[float]
) -> None:
    moments = iter(sorted(host))
    clock = StepClock(lambda: next(moments))
    ends = list(accumulate(distances))
    found = []
    for end in ends:  # every step is launched before the one before is taken
        clock.launched(FakeSpan(end))
    for _ in ends:
        found.append(clock.take())
    assert found[0] == 0.0
    assert found == pytest.approx([end - ends[0] for end in ends])


def test_the_last_step_of_a_host_that_blocks_in_launches_is_as_long_as_the_others() -> None:
    """It reads each step when the launch of the next has returned, and the last one at once."""
    reads = [0.0, 1.0, 2.0, 2.0]
    clock = StepClock(iter(reads).__next__)
    for index in range(4):
        clock.launched(FakeSpan(float(index)))
    assert [clock.take() for _ in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_a_step_that_the_host_runs_itself_ends_with_its_launch() -> None:
    moments = iter([5.0, 6.0, 8.5])
    clock = StepClock(lambda: next(moments))
    for _ in range(3):
        clock.launched(None)
    assert [clock.take() for _ in range(3)] == [0.0, 1.0, 3.5]


def test_quantiles_lie_between_times() -> None:
    assert Quantiles.of([0.003, 0.001, 0.002]).p50 == pytest.approx(2.0)
    assert Quantiles.of([0.001]).p90 == pytest.approx(1.0)
    assert Quantiles.of([0.0, 0.010]).p10 == pytest.approx(1.0)
