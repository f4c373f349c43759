"""Steps of a measurement in the engine loop that serves (`worker.step_loop`), and their times.

The loop plans, meets the other ranks, launches ahead and takes results over exactly as in a worker;
a driver gives it requests that never run out. The key idea: nothing of the pipeline is written
here, so nothing of it can differ. What a worker does in between and this does not: commands,
scheduling, books, pushes of KV, frames to routers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from bench.engine.report import Report
from bench.engine.timing import StepClock, StepTimes
from engine.boot.rank import use_device
from engine.experts.votes import ExpertTurns, StandingExperts
from engine.parallel.lockstep import Lockstep
from engine.parallel.wait_recorder import WaitRecorder
from engine.pending_step import PendingStep, StepResult
from engine.request import ScheduledRequest
from engine.step_error import StepError
from runtime.errors import TandemError
from worker.endings import RankName
from worker.step_driver import LoopOptions
from worker.step_loop import StepLoop

_POLL_S = 0.2


class RequestSource(Protocol):
    """Where steps come from."""

    def __len__(self) -> int:
        """Requests of a step; 0 where this rank only joins the others' steps."""
        ...

    def schedule(self) -> list[ScheduledRequest]:
        """What runs next."""
        ...

    def take(self, results: Iterable[StepResult]) -> None:
        """What came of the oldest step that was not taken."""
        ...


class StepRunner(Protocol):
    """Runs a role's steps; what a launch is given is as in `worker.step_driver.StepDriver`."""

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        after: PendingStep | None,
        group_mean: int,
        meanwhile: Callable[[], None],
    ) -> PendingStep:
        """Issue one step."""
        ...

    def run_dummy(self, group_mean: int) -> None:
        """Join the other ranks' step."""
        ...


class LoopExperts(ExpertTurns, Protocol):
    """What a loop does about experts between its steps; `bench.engine.moving.WatchedExperts`."""

    def attach(
        self, post: Callable[[Callable[[], None]], None], *, runs_ahead: bool = False
    ) -> None:
        """Begin.

        Args:
            post: has the loop's thread do something between two steps.
            runs_ahead: whether a step is launched while the one before it runs.
        """
        ...

    def passed(self) -> None:
        """The group has launched a step."""
        ...


@dataclass(frozen=True, slots=True)
class StepWork:
    """Of one step."""

    scheduled: Sequence[ScheduledRequest]

    @property
    def num_tokens(self) -> int:
        """Of this rank."""
        return sum(item.num_scheduled_tokens for item in self.scheduled)


class BenchSteps:
    """The driver of the loop; see `worker.step_driver.StepDriver`."""

    is_empty = False
    rest_s = 0.05

    def __init__(
        self,
        source: RequestSource,
        runner: StepRunner,
        times: StepTimes,
        *,
        begin_step: Callable[[], None] = lambda: None,
        announce: Callable[[Sequence[ScheduledRequest]], None] = lambda scheduled: None,
        dismiss: Callable[[], None] = lambda: None,
        tell: Callable[[], None] = lambda: None,
        clock: StepClock | None = None,
    ) -> None:
        """Drive.

        Args:
            source: of the steps.
            runner: runs them.
            times: are told of their ends.
            begin_step: issues what comes before every step of this rank.
            announce: tells ranks that follow this one what comes.
            dismiss: tells them that nothing comes any more.
            tell: called between two steps.
            clock: tells when steps ended.
        """
        self._source, self._runner, self._times = source, runner, times
        self._begin_step, self._announce, self._dismiss = begin_step, announce, dismiss
        self._tell = tell
        self._clock = clock or StepClock()

    @property
    def has_requests(self) -> bool:
        """Whether steps of our own come."""
        return len(self._source) > 0

    def heard(self) -> None:
        """Nobody says anything but to leave."""

    def plan(self, complete_launched: Callable[[], None]) -> StepWork:
        """Every request goes on."""
        work = StepWork(self._source.schedule())
        self._announce(work.scheduled)
        return work

    def launch(
        self,
        plan: StepWork,
        after: PendingStep | None,
        group_mean: int,
        meanwhile: Callable[[], None],
    ) -> PendingStep:
        """Issue the step."""
        self._begin_step()
        pending = self._runner.launch(plan.scheduled, after, group_mean, meanwhile)
        self._clock.launched(pending.span)
        return pending

    def launch_dummy(self, group_mean: int) -> None:
        """Take part in the others' step."""
        self._begin_step()
        self._runner.run_dummy(group_mean)

    def give_up(self, plan: StepWork, error: StepError) -> None:
        """A measurement in which a step failed is none."""
        raise error

    def answer(self, plan: StepWork, results: Sequence[StepResult], seconds: float) -> None:
        """Nobody waits for tokens."""

    def book(
        self, plan: StepWork, results: Sequence[StepResult], seconds: float, idle_s: float | None
    ) -> None:
        """Note when it ended."""
        self._times.add(
            self._clock.take(),
            idle_s=idle_s,
            num_requests=len(plan.scheduled),
            num_positions=sum(item.end for item in plan.scheduled),
            # Invented weights may give no usable logits; the step was the same work.
            num_tokens=sum(max(len(result.tokens), 1) for result in results),
        )
        self._source.take(results)

    def tell(self) -> None:
        """Whoever measures may look."""
        self._tell()

    def check_integrity(self) -> None:
        """There are no books."""

    def leave(self) -> None:
        """Let the followers go."""
        self._dismiss()

    def end(self, error: TandemError | None) -> None:
        """Nobody waits for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlace:
    """Where a loop runs.

    Attributes:
        rank: of all.
        num_ranks: that meet before a step.
        device: of the rank.
        max_ahead: steps that may run while another is launched.
        experts: who looks at them, and moves them; None for nobody.
    """

    rank: int
    num_ranks: int
    device: torch.device
    max_ahead: int
    experts: LoopExperts | None = None


def measure_steps(
    driver: BenchSteps,
    times: StepTimes,
    lockstep: Lockstep,
    place: LoopPlace,
    *,
    look: Callable[[], Report] = dict,
    waits: WaitRecorder | None = None,
) -> list[Report]:
    """Run steps on a thread of their own until `times` have enough of them on every rank.

    Args:
        driver: of the loop.
        times: that the driver tells.
        lockstep: the meeting of the ranks.
        place: which rank.
        look: called while steps run, when the measured ones begin and when they suffice.
        waits: of the lockstep; told of steps as in a worker.

    Returns:
        What was seen at both ends; nothing on a rank without requests.

    Raises:
        TandemError: a step failed, or another rank was lost.
    """
    experts = place.experts
    loop = StepLoop[StepWork](
        driver,
        lockstep,
        LoopOptions(
            name=RankName(instance="bench", rank=place.rank, num_ranks=place.num_ranks),
            step="measured",
            max_ahead=place.max_ahead,
            enter_thread=partial(use_device, place.device),
            launched=partial(_tell, experts, waits),
            device_wait=nullcontext if waits is None else waits.device_wait,
            experts=StandingExperts() if experts is None else experts,
        ),
    )
    if experts is not None:
        experts.attach(loop.post, runs_ahead=place.max_ahead > 0)
    loop.start()
    seen = []
    for moment in (times.began, times.enough) if driver.has_requests else ():
        if _comes(moment, loop):
            seen.append(look())
    loop.post(loop.leave)  # in a group it ends when all ranks have said so
    loop.join()
    error = loop.ended.result()
    if error is not None:
        raise error
    return seen


def _tell(experts: LoopExperts | None, waits: WaitRecorder | None) -> None:
    """Say that a step was launched."""
    if experts is not None:
        experts.passed()
    if waits is not None:
        waits.launched()


def _comes(moment: threading.Event, loop: StepLoop[StepWork]) -> bool:
    """Wait for it; false if the loop ended before."""
    while not moment.wait(_POLL_S):
        if loop.ended.done():
            return moment.is_set()
    return True
