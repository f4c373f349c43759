"""The loop itself, with a role that counts; what roles do in it is tested with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from prometheus_client import CollectorRegistry

from engine.parallel.lockstep import GroupState, Lockstep, RankState, SoloLockstep
from engine.pending_step import StepResult
from engine.step_error import StepError, may_fail
from runtime.errors import DrainingError, InternalError, InvalidRequestError, TandemError
from worker.endings import RankName
from worker.health import Health
from worker.step_driver import LoopOptions, steps_ahead
from worker.step_loop import MAX_FAILED_STEPS, StepLoop
from worker.watchdog import WatchdogOptions

TIMEOUT_S = 60.0


@dataclass
class Work:
    """So many tokens."""

    num_tokens: int


@dataclass
class Done:
    """A step that is over when it is collected."""

    read: Callable[[], None]
    idle_s = None
    is_done = True

    def collect_sampled(self) -> list[StepResult] | None:
        return None

    def collect(self) -> list[StepResult]:
        self.read()
        return []


class CountingDriver:
    """Runs one item of `work` a step."""

    def __init__(self) -> None:
        self.work: list[int] = []
        self.booked: list[int] = []
        self.means: list[int] = []
        self.ends: list[TandemError | None] = []
        self.log: list[str] = []
        self.num_rests = 0
        self.on_launch: Callable[[], None] = lambda: None
        self.on_book: Callable[[], None] = lambda: None
        self.collect: Callable[[], None] = lambda: None
        self.lets_through = False
        self.is_broken = False
        self.is_alone = True

    @property
    def is_empty(self) -> bool:
        return not self.work

    @property
    def rest_s(self) -> float:
        self.num_rests += 1
        return 0.02

    def heard(self) -> None:
        pass

    def plan(self, complete_launched: Callable[[], None]) -> Work:
        return Work(self.work[0] if self.work else 0)

    def launch(
        self, plan: Work, after: Done | None, group_mean: int, meanwhile: Callable[[], None]
    ) -> Done:
        assert plan.num_tokens == group_mean > 0 or not self.is_alone
        self.means.append(group_mean)
        self.on_launch()
        if self.lets_through:
            self.log.append(f"launching {plan.num_tokens}")
            meanwhile()
            self.log.append(f"launched {plan.num_tokens}")
        return Done(self.collect)

    def launch_dummy(self, group_mean: int) -> None:
        self.means.append(group_mean)
        self.log.append("join")

    def give_up(self, plan: Work, error: StepError) -> None:
        self.log.append(f"gave up {plan.num_tokens}")
        self.work.pop(0)

    def answer(self, plan: Work, results: Sequence[StepResult], seconds: float) -> None:
        self.log.append(f"answered {plan.num_tokens}")

    def book(
        self, plan: Work, results: Sequence[StepResult], seconds: float, idle_s: float | None
    ) -> None:
        self.on_book()
        self.log += [f"booked {plan.num_tokens}"] * self.lets_through
        self.booked.append(self.work.pop(0))

    def tell(self) -> None:
        pass

    def check_integrity(self) -> None:
        if self.is_broken:
            raise InternalError("a block is lost")

    def leave(self) -> None:
        self.log.append("leave")

    def end(self, error: TandemError | None) -> None:
        self.log.append("end")
        self.ends.append(error)


def make_loop(
    lockstep: Lockstep | None = None, clock: Callable[[], float] = time.monotonic
) -> tuple[StepLoop[Work], CountingDriver]:
    driver = CountingDriver()
    options = LoopOptions(name=RankName(instance="rank"), step="counting", clock=clock)
    return StepLoop[Work](driver, lockstep or SoloLockstep(), options), driver


def test_it_runs_what_there_is_and_ends_once() -> None:
    loop, driver = make_loop()
    loop.start()
    loop.submit(lambda: driver.work.extend([3, 1, 2])).result(TIMEOUT_S)
    while len(driver.booked) < 3:
        time.sleep(0.001)
    assert loop.stop(TIMEOUT_S)
    assert driver.booked == [3, 1, 2]
    assert (driver.log, driver.ends) == (["leave", "end"], [None])
    assert loop.ended.result(TIMEOUT_S) is None


class AheadDriver(CountingDriver):
    """Plans the next item while the one before it is not booked."""

    def plan(self, complete_launched: Callable[[], None]) -> Work:
        planned = sum(line.startswith("launched") for line in self.log) - len(self.booked)
        return Work(self.work[planned] if len(self.work) > planned else 0)


def test_a_step_that_is_over_is_booked_in_the_middle_of_the_next_launch() -> None:
    driver = AheadDriver()
    driver.lets_through = True
    driver.work = [3, 1]
    # Booking takes longer than a launch may, which is not watched for it.
    driver.on_book = lambda: time.sleep(0.0 if driver.booked else 2.5)
    options = LoopOptions(
        name=RankName(instance="rank"),
        step="counting",
        max_ahead=1,
        limit_s=lambda num_tokens: 2.0,
        watchdog=WatchdogOptions(poll_s=0.005, abort=lambda: None),
    )
    loop = StepLoop[Work](driver, SoloLockstep(), options)
    loop.start()
    while len(driver.booked) < 2:
        time.sleep(0.001)
    assert loop.stop(TIMEOUT_S)
    assert loop.ended.result(TIMEOUT_S) is None
    assert driver.log[:5] == [
        *("launching 3", "launched 3", "launching 1", "booked 3", "launched 1")
    ]


@pytest.mark.parametrize(
    ("wanted", "launch_waits", "steps"), [(1, False, 1), (1, True, 0), (0, True, 0), (0, False, 0)]
)
def test_nobody_runs_ahead_of_a_launch_that_waits(
    wanted: int, launch_waits: bool, steps: int
) -> None:
    assert steps_ahead(wanted, launch_waits=launch_waits) == steps


class LeavingGroup:
    """Another rank was told to stop, and goes as soon as this one does."""

    is_group = True

    def exchange(self, state: RankState) -> GroupState:
        return GroupState(
            has_work=state.num_tokens > 0,
            max_num_tokens=state.num_tokens,
            mean_num_tokens=state.num_tokens,
            all_leaving=state.leaving,
            any_leaving=True,
        )


def test_a_rank_hears_that_another_one_leaves_and_goes_on_with_its_work() -> None:
    loop, driver = make_loop(LeavingGroup())
    loop.start()
    assert loop.other_leaves.result(TIMEOUT_S) is None
    loop.submit(lambda: driver.work.extend([3, 1])).result(TIMEOUT_S)
    while len(driver.booked) < 2:
        time.sleep(0.001)
    assert loop.stop(TIMEOUT_S)
    assert loop.ended.result(TIMEOUT_S) is None


class FullerGroup(LeavingGroup):
    """Another rank brings ten tokens to every step."""

    def exchange(self, state: RankState) -> GroupState:
        return replace(super().exchange(state), has_work=True, max_num_tokens=10, mean_num_tokens=6)


def test_it_counts_its_own_tokens_and_those_that_it_waited_for() -> None:
    loop, driver = make_loop(FullerGroup())
    driver.is_alone = False
    driver.work = [3, 1]
    for _ in range(3):
        loop.step()
    assert (loop.num_tokens, loop.num_tokens_of_most) == (4, 30)
    assert driver.means == [6, 6, 6], "steps are as large as the group's mean, not its largest"
    registry = CollectorRegistry()
    Health(registry).watch_loop(loop)
    assert registry.get_sample_value("pd_worker_step_tokens_total") == 4
    assert registry.get_sample_value("pd_worker_longest_step_tokens_total") == 30


def failing(errors: list[StepError | None]) -> Callable[[], None]:
    """Raise them one by one, None for nothing; then nothing any more."""

    def fail() -> None:
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error

    return fail


def test_a_step_that_fails_alone_is_given_up_and_the_next_one_runs() -> None:
    loop, driver = make_loop()
    driver.on_launch = failing([None, StepError("no room", has_joined=True)])
    loop.submit(lambda: driver.work.extend([3, 2, 1]))
    loop.start()
    while len(driver.booked) < 2:
        time.sleep(0.001)
    assert loop.stop(TIMEOUT_S)
    assert driver.booked == [3, 1]
    assert driver.log == ["gave up 2", "leave", "end"]
    assert loop.ended.result(TIMEOUT_S) is None


@pytest.mark.parametrize("has_joined", [False, True])
def test_the_others_do_not_wait_for_a_rank_whose_step_failed(has_joined: bool) -> None:
    loop, driver = make_loop(LeavingGroup())
    driver.on_launch = failing([StepError("no room", has_joined=has_joined)])
    driver.work = [3, 1]
    loop.step()
    assert driver.log == ["join"] * (not has_joined) + ["gave up 3"]
    loop.step()
    assert driver.booked == [1]


@pytest.mark.parametrize("has_joined", [False, True])
def test_every_step_of_the_group_is_told_of_once(has_joined: bool) -> None:
    driver, told = CountingDriver(), list[int]()
    name = RankName(instance="rank")
    options = LoopOptions(
        name=name, step="counting", launched=lambda: told.append(len(driver.means))
    )
    loop = StepLoop[Work](driver, FullerGroup(), options)
    driver.is_alone = False
    driver.on_launch = failing([None, StepError("no room", has_joined=has_joined)])
    driver.work = [3, 2]
    for _ in range(3):  # a step, one that fails alone, a dummy
        loop.step()
    assert len(told) == 3
    assert told[0] == 1, "behind the launch"


def test_a_rank_whose_every_step_fails_ends() -> None:
    loop, driver = make_loop()
    errors: list[StepError | None] = [None]
    errors += [StepError("no room", has_joined=True)] * (MAX_FAILED_STEPS - 1)
    errors += [None]  # one that succeeds: they were not in a row
    errors += [StepError("a bad token", request_id="r", has_joined=False)] * 2 * MAX_FAILED_STEPS
    errors += [StepError("no room", has_joined=True)] * MAX_FAILED_STEPS
    driver.on_launch = failing(list(errors))
    driver.work = [1] * len(errors) + [7]
    loop.start()
    error = loop.ended.result(TIMEOUT_S)
    assert isinstance(error, InternalError)
    assert "8 steps in a row failed, the last of them: no room" in str(error)
    assert driver.work == [7]


def test_a_result_that_cannot_be_read_fails_its_step() -> None:
    loop, driver = make_loop()
    errors = failing([StepError("unreadable", has_joined=True)])
    driver.collect = lambda: errors()
    driver.work = [3, 1]
    loop.step()
    loop.step()
    assert (driver.log, driver.booked) == (["gave up 3"], [1])


class FailingAhead(AheadDriver):
    """Whatever is raised in a launch, a runner would call the failure of its step."""

    def launch(
        self, plan: Work, after: Done | None, group_mean: int, meanwhile: Callable[[], None]
    ) -> Done:
        with may_fail(torch.device("cpu"), has_joined=True):
            return super().launch(plan, after, group_mean, meanwhile)


def test_what_fails_while_a_step_is_booked_is_not_the_fault_of_the_launch_around_it() -> None:
    driver = FailingAhead()
    options = LoopOptions(name=RankName(instance="rank"), step="counting", max_ahead=1)
    loop = StepLoop[Work](driver, SoloLockstep(), options)
    driver.lets_through = True

    def break_books() -> None:
        raise RuntimeError("the books are wrong")

    driver.on_book = break_books
    loop.submit(lambda: driver.work.extend([3, 1]))
    loop.start()
    assert "the books are wrong" in str(loop.ended.result(TIMEOUT_S))
    assert not any(line.startswith("gave up") for line in driver.log)


def test_what_a_posted_command_raises_ends_the_loop() -> None:
    loop, driver = make_loop()

    def refuse() -> None:
        raise InvalidRequestError("nobody hears of it")

    loop.post(refuse)
    loop.start()
    error = loop.ended.result(TIMEOUT_S)
    assert isinstance(error, InternalError)
    assert "nobody hears of it" in str(error)
    assert (driver.log, driver.ends) == (["end"], [error])


def test_what_is_submitted_before_the_end_is_run_and_what_is_posted_is_not() -> None:
    loop, _ = make_loop()
    ran: list[str] = []
    loop.post(loop.leave)
    loop.post(lambda: ran.append("posted"))
    awaited = loop.submit(lambda: ran.append("awaited"))
    loop.start()
    assert awaited.result(TIMEOUT_S) is None
    assert loop.ended.result(TIMEOUT_S) is None
    assert ran == ["awaited"]
    with pytest.raises(DrainingError):
        loop.submit(lambda: ran.append("late")).result(TIMEOUT_S)


def test_books_that_do_not_agree_end_an_idle_rank() -> None:
    loop, driver = make_loop()
    loop.start()
    loop.submit(lambda: None).result(TIMEOUT_S)

    def lose_a_block() -> None:
        driver.is_broken = True
        driver.work.append(1)

    loop.submit(lose_a_block)
    error = loop.ended.result(TIMEOUT_S)
    assert "a block is lost" in str(error)


def test_a_driver_that_cannot_answer_does_not_keep_the_end_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, driver = make_loop()

    def fail(error: TandemError | None) -> None:
        raise RuntimeError("no answer")

    monkeypatch.setattr(driver, "end", fail)
    loop.start()
    assert loop.stop(TIMEOUT_S)
    assert loop.ended.result(TIMEOUT_S) is None


def test_submit_from_many_threads_is_answered_whatever_ends_the_loop() -> None:
    loop, driver = make_loop()
    loop.start()
    outcomes: list[BaseException | None] = []

    def ask() -> None:
        for _ in range(200):
            outcomes.append(loop.submit(lambda: None).exception(TIMEOUT_S))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert loop.stop(TIMEOUT_S)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(outcomes) == 800
    assert all(outcome is None or isinstance(outcome, DrainingError) for outcome in outcomes)
    assert driver.ends == [None]
