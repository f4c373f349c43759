"""`python -m tests.integration.slow_decode`: a decode rank whose steps take a while, as big ones.

So that a stream is surely under way when something happens to its worker, on any machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from decode.assembly import ModelSide, build_model_side
from decode.loop import StepRunner
from decode.worker import DecodeDriver
from engine.pending_step import PendingStep
from engine.request import ScheduledRequest
from worker.arguments import WorkerOptions
from worker.host import WorkerHost
from worker.run import RankService, run_worker

STEP_S = 0.04
"""No step is shorter."""


@dataclass(frozen=True, slots=True)
class SlowRunner:
    """Sleeps before each step."""

    runner: StepRunner

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        after: PendingStep | None = None,
        group_mean: int = 0,
        num_drafts: int | None = None,
    ) -> PendingStep:
        """See `decode.loop.StepRunner`."""
        time.sleep(STEP_S)
        return self.runner.launch(scheduled, after=after, group_mean=group_mean)

    def run_dummy(self, *, group_mean: int = 0, num_drafts: int | None = None) -> None:
        """See `decode.loop.StepRunner`."""
        self.runner.run_dummy(group_mean=group_mean)


def build_slow(options: WorkerOptions) -> ModelSide:
    """Boot the rank as ever, and slow it down."""
    side = build_model_side(options)
    return replace(side, runner=SlowRunner(side.runner))


def make_service(options: WorkerOptions) -> RankService:
    """The service of this rank."""
    return WorkerHost(options, DecodeDriver(options, build_slow))


if __name__ == "__main__":
    sys.exit(run_worker("decode", sys.argv[1:], make_service))
