"""What a decode rank does in its engine loop (`worker.step_loop`): a token for every request, or
with drafts a few.

With a step launched ahead the requests of both take their tokens from the device. Whether a request
has ended is then known one step late; the token that the late step gives it is dropped, and its
blocks are free when that step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from decode.draft_budget import DraftBudget, DraftedStep
from decode.frames import Delta
from decode.metrics import DecodeMetrics
from decode.rank import DecodeRank
from decode.scheduler import StepPlan
from engine.parallel.wait_recorder import WaitRecorder
from engine.pending_step import PendingStep, StepResult
from engine.request import ScheduledRequest
from engine.step_error import StepError
from runtime.errors import TandemError
from runtime.pb import registry_pb2
from worker.endings import RankName, failure_of_requests
from worker.step_loop import StepLoop

EngineLoop = StepLoop[StepPlan]
Publish = Callable[[Mapping[str, list[Delta]], registry_pb2.WorkerLoad], None]
"""Takes a step's news without blocking; called on the loop's thread."""

IDLE_WAIT_S = 0.05
"""Alone and idle: deadlines are looked at so often."""


class StepRunner(Protocol):
    """What the loop needs of a model runner."""

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        after: PendingStep | None = None,
        group_mean: int = 0,
        num_drafts: int | None = None,
    ) -> PendingStep:
        """Issue one step to the device and return without waiting for it.

        Args:
            scheduled: at least one request, one token each; what they hold is read now.
            after: the step before, if its tokens are not read: they are what `scheduled` runs where
                `num_unread` says so.
            group_mean: tokens that a rank of the group runs in this step on average, rounded up.
            num_drafts: of each request, the same on all ranks; None where there is no choice.
        """
        ...

    def run_dummy(self, *, group_mean: int = 0, num_drafts: int | None = None) -> None:
        """Launch our part in the other ranks' step without a request of our own."""
        ...


class DecodeSteps:
    """See `worker.step_driver.StepDriver`, of which this is decode's."""

    def __init__(
        self,
        rank: DecodeRank,
        runner: StepRunner,
        *,
        metrics: DecodeMetrics,
        publish: Publish,
        name: RankName,
        tell_cache: Callable[[], None] = lambda: None,
        budget: DraftBudget | None = None,
        waits: WaitRecorder | None = None,
    ) -> None:
        """Take a rank, its runner, and who is told.

        Args:
            rank: the books.
            runner: of its steps.
            metrics: of the worker.
            publish: takes the news of every step.
            name: for the rank's last words.
            tell_cache: called after every step, to hand over what happened to the prefix cache.
            budget: rides in the lockstep, and says how many drafts the step has that was agreed on
                there; None where that is no choice.
            waits: told how much KV a step reads.
        """
        self._budget = budget
        self._drafted: dict[int, DraftedStep] = {}  # by `id` of the plan, until it is booked
        self._rank, self._runner, self._metrics = rank, runner, metrics
        self._publish, self._name = publish, name
        self._tell_cache, self._waits = tell_cache, waits

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left, neither a request nor a block in quarantine or in a step."""
        return self._rank.is_empty

    @property
    def rest_s(self) -> float:
        """Until deadlines have to be looked at."""
        return IDLE_WAIT_S

    def heard(self) -> None:
        """The next step's plan sees to it."""

    def plan(self, complete_launched: Callable[[], None]) -> StepPlan:
        """One token a request, and its drafts."""
        plan = self._rank.plan_step(complete_launched)
        if self._budget is not None:
            self._budget.plan([item.request for item in plan.requests])
        if self._waits is not None:
            self._waits.num_context_tokens = sum(item.start for item in plan.scheduled)
        return plan

    def launch(
        self,
        plan: StepPlan,
        after: PendingStep | None,
        group_mean: int,
        meanwhile: Callable[[], None],
    ) -> PendingStep:
        """Issue the step, which is short: results wait for its end."""
        if self._budget is None:
            return self._runner.launch(plan.scheduled, after=after, group_mean=group_mean)
        drafted = self._budget.launch()
        pending = self._runner.launch(
            plan.scheduled, after=after, group_mean=group_mean, num_drafts=drafted.num_drafts
        )
        self._drafted[id(plan)] = drafted
        return pending

    def launch_dummy(self, group_mean: int) -> None:
        """Run a padding token."""
        if self._budget is None:
            self._runner.run_dummy(group_mean=group_mean)
            return
        drafted = self._budget.launch()
        self._runner.run_dummy(group_mean=group_mean, num_drafts=drafted.num_drafts)

    def give_up(self, plan: StepPlan, error: StepError) -> None:
        """No token comes of it."""
        self._drafted.pop(id(plan), None)
        self._rank.give_up_step(plan, error)

    def answer(self, plan: StepPlan, results: Sequence[StepResult], seconds: float) -> None:
        """A step of decode has all at once."""

    def book(
        self, plan: StepPlan, results: Sequence[StepResult], seconds: float, idle_s: float | None
    ) -> None:
        """Give the tokens to their requests."""
        if self._budget is not None:
            self._budget.book(self._drafted.pop(id(plan)), results, seconds)
        num_tokens = self._rank.complete_step(
            plan,
            [result.tokens for result in results],
            [result.num_verified for result in results],
        )
        self._metrics.stepped(len(results), num_tokens, seconds)
        self._rank.stepped(len(results), seconds, results[0].max_drafts)
        if idle_s is not None:
            self._metrics.step_waited(idle_s)

    def tell(self) -> None:
        """Publish news and load."""
        self._publish(self._rank.news.take(), self._rank.load())
        self._tell_cache()

    def check_integrity(self) -> None:
        """Of all books."""
        self._rank.check_integrity()

    def leave(self) -> None:
        """Nobody has to be told."""

    def end(self, error: TandemError | None) -> None:
        """Answer everybody."""
        self._rank.live.fail_all(
            lambda one: failure_of_requests(self._name, error, in_step=one.request.is_in_step)
        )
        self.tell()
