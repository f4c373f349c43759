"""A role's part in the engine loop: what is in a step, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from engine.experts.votes import ExpertTurns, StandingExperts
from engine.pending_step import PendingStep, StepResult
from engine.step_error import StepError
from runtime.errors import TandemError
from runtime.logging import get_logger
from worker.endings import RankName
from worker.watchdog import WatchdogOptions

logger = get_logger(__name__)


class Plan(Protocol):
    """What a rank is going to run."""

    @property
    def num_tokens(self) -> int:
        """0 where there is nothing of its own."""
        ...


PlanT = TypeVar("PlanT", bound=Plan)


class StepDriver(Protocol[PlanT]):
    """Called on the loop's thread; where a step is given up, `end` and commands that are waited for
    on the watchdog's.
    """

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left, neither a request nor a block."""
        ...

    @property
    def rest_s(self) -> float:
        """How long a rank that is alone and has nothing to run may sleep."""
        ...

    def heard(self) -> None:
        """Commands were carried out; perhaps while a step runs, and before the next is planned."""
        ...

    def plan(self, complete_launched: Callable[[], None]) -> PlanT:
        """End what is late, and decide the step; may have all launched steps taken over first."""
        ...

    def launch(
        self,
        plan: PlanT,
        after: PendingStep | None,
        group_mean: int,
        meanwhile: Callable[[], None],
    ) -> PendingStep:
        """Issue our part in the group's step without waiting for it; changes no request.

        Args:
            plan: has tokens.
            after: the step before, where its results are not read.
            group_mean: tokens that a rank of the group runs in this step on average, rounded up.
            meanwhile: books steps that are over by then; to be called now and then where issuing a
                step takes longer than their results may wait.

        Raises:
            StepError: the step gives nothing; the plan is given up.
        """
        ...

    def launch_dummy(self, group_mean: int) -> None:
        """Take part in the others' step without a request; nothing is to be read of it."""
        ...

    def give_up(self, plan: PlanT, error: StepError) -> None:
        """The step gives nothing: end those of its requests that `error` ends; the rest go on."""
        ...

    def answer(self, plan: PlanT, results: Sequence[StepResult], seconds: float) -> None:
        """Give away the tokens of a step that drafts behind them, before it is over.

        Called before `book`, which gets the same results with the drafts. `seconds` are those of
        the step so far.
        """
        ...

    def book(
        self, plan: PlanT, results: Sequence[StepResult], seconds: float, idle_s: float | None
    ) -> None:
        """Carry on with a step's requests, from what was collected.

        `seconds` are those of the step alone; `idle_s` those of the device right before it, None
        where nothing ran before, or if unknown.
        """
        ...

    def tell(self) -> None:
        """Publish what the turn has brought."""
        ...

    def check_integrity(self) -> None:
        """Raise InternalError unless an empty rank's books agree."""
        ...

    def leave(self) -> None:
        """After the last step of a loop that was told to stop."""
        ...

    def end(self, error: TandemError | None) -> None:
        """Answer everybody: the loop is over, because of `error` or told to stop. Called last."""
        ...


def steps_ahead(wanted: int, *, launch_waits: bool) -> int:
    """Return the steps that may run while another is launched: none where launching waits for them.

    Running ahead would then hold the results of a step back until the end of the next one.

    Args:
        wanted: by the configuration.
        launch_waits: whether launching a step takes as long as the step.
    """
    if not wanted or not launch_waits:
        return wanted
    logger.warning(
        "steps do not overlap: tokens travel to experts in a way that needs counts on the host"
    )
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """What does not change while the loop runs; times in seconds.

    Attributes:
        name: of the rank, for its last words.
        step: what a step is called in them.
        max_ahead: steps that may run while another is launched; 0 on a CPU, which runs one at once.
        ahead_poll_s: while the last step runs and nothing else can, commands are let in, and it is
            looked at so often; 0 to wait for it, where steps are shorter than that is worth.
        limit_s: how long a step of so many tokens may take; 0 for no limit.
        enter_thread: called first on the loop's thread.
        launched: called on it behind every step of the group, whatever this rank had in it; as
            often on all ranks.
        device_wait: entered while the thread waits for the end of a step.
        experts: this rank's part in moving them between steps.
        watchdog: how it is noticed that a step takes longer.
        clock: monotonic.
    """

    name: RankName
    step: str
    max_ahead: int = 0
    ahead_poll_s: float = 0.0
    limit_s: Callable[[int], float] = lambda num_tokens: 0.0
    enter_thread: Callable[[], None] = lambda: None
    launched: Callable[[], None] = lambda: None
    device_wait: Callable[[], AbstractContextManager[None]] = nullcontext
    experts: ExpertTurns = field(default_factory=StandingExperts)
    watchdog: WatchdogOptions = field(default_factory=WatchdogOptions)
    clock: Callable[[], float] = time.monotonic
