"""Steps of which each has as many drafts as the budget of a worker gives it, as in its loop.

The budget hears of what a step runs before the ranks meet, and of what came of it afterwards; both
are known to the source of the steps, so it is wrapped. How many drafts each step had is counted:
that is what a measurement of an adaptive setting has to tell.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from bench.engine.requests import RunningRequests
from decode.draft_budget import DraftBudget, DraftedStep
from engine.graphs.graph_runner import GraphRunner
from engine.pending_step import PendingStep, StepResult
from engine.request import ScheduledRequest
from engine.sampling.token_mask import NO_DRAFT


class DraftedSource:
    """The requests of a rank, and the budget that is told of them."""

    def __init__(self, requests: RunningRequests, budget: DraftBudget | None) -> None:
        """`budget` is None where there is no choice."""
        self._requests, self._budget = requests, budget
        self._launched: deque[DraftedStep] = deque()
        self._taken_at: float | None = None
        self.num_steps: Counter[int] = Counter()
        """Of the group, those included that this rank only joined, by number of drafts."""

    def __len__(self) -> int:
        """Requests of every step."""
        return len(self._requests)

    def schedule(self) -> list[ScheduledRequest]:
        """The next step."""
        scheduled = self._requests.schedule()
        if self._budget is not None:
            self._budget.plan([item.request for item in scheduled])
        return scheduled

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> int | None:
        """Return how many drafts the step has that is launched now; None without a choice."""
        if self._budget is None:
            return None
        step = self._budget.launch()
        self.num_steps[step.num_drafts] += 1
        if scheduled:
            self._launched.append(step)
        return step.num_drafts

    def take(self, results: Iterable[StepResult]) -> None:
        """What came of the oldest step that was not taken."""
        results = list(results)
        if self._budget is not None:
            now, before = time.perf_counter(), self._taken_at
            self._taken_at = now
            step = self._launched.popleft()
            if before is not None:
                self._budget.book(step, results, now - before)
        self._requests.take(results)


class DraftedRunner:
    """Launches as the loop of a decode worker does: a step's launch is short."""

    def __init__(
        self, runner: GraphRunner, source: DraftedSource | None = None, accept: float | None = None
    ) -> None:
        """Run steps.

        Args:
            runner: of the rank.
            source: says how many drafts a step has; None where there is no choice.
            accept: share of drafts that are left before each step; the others become wrong ones,
                which a step verifies like any. None for all.
        """
        self._runner, self._source, self._accept = runner, source, accept

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        after: PendingStep | None,
        group_mean: int,
        meanwhile: Callable[[], None],
    ) -> PendingStep:
        """Issue one step."""
        self._lose_drafts()
        number = None if self._source is None else self._source.launch(scheduled)
        return self._runner.launch(scheduled, after=after, group_mean=group_mean, num_drafts=number)

    def run_dummy(self, group_mean: int) -> None:
        """Join the other ranks' step."""
        number = None if self._source is None else self._source.launch(())
        self._runner.run_dummy(group_mean=group_mean, num_drafts=number)

    def _lose_drafts(self) -> None:
        drafts = self._runner.kept_drafts
        if drafts is not None and self._accept is not None:
            lose_drafts(drafts, self._accept, self._runner.plain.sampler.vocab_size)


def lose_drafts(drafts: Tensor, accept: float, vocab_size: int) -> None:
    """Leave a share of drafts, and make each other one the token behind it.

    No draft at all would be another thing: nothing is verified there, so nobody would learn that
    drafts are wrong, and a budget would take all that are left for right.

    Args:
        drafts: tokens, or `NO_DRAFT`; changed.
        accept: share that is left.
        vocab_size: of the model.
    """
    wrong = torch.where(drafts == NO_DRAFT, drafts, (drafts + 1) % vocab_size)
    is_lost = torch.rand(drafts.shape, device=drafts.device) >= accept
    drafts.copy_(torch.where(is_lost, wrong, drafts))
