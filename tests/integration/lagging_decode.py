"""`python -m tests.integration.lagging_decode`: a decode rank whose CPU behaves as a GPU would.

It runs the fixed-shape steps that are graphs on a GPU, and runs them on a thread of their own that
is behind its host by random times. So a step reads and writes KV long after it was launched, as on
a GPU and unlike on a CPU: blocks that are given away too early are written by two, and tokens that
come late come really late. Copies from and to host memory take their turn on the same thread.

What a step runs is noted when it is launched, in a shadow of each request. Prompts that begin with
`BROKEN` lose their numbers: KV and logits of one step are NaN.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from decode.assembly import ModelSide, build_model_side
from decode.worker import DecodeDriver
from engine.graphs.graph_runner import GraphRunner
from engine.memory.kv_pool import KVPool
from engine.parallel.groups import RankGroup
from engine.parallel.lockstep import create_lockstep
from engine.pending_step import PendingStep, StepResult
from engine.request import Request, ScheduledRequest
from tests.integration.fixed_decode import fixed_runner
from worker.arguments import WorkerOptions
from worker.host import WorkerHost
from worker.run import RankService, run_worker

BROKEN = 299
"""The first token of a prompt whose numbers get lost."""
BROKEN_AT = 3
"""Output tokens before that."""
LAGS_S = (0.0, 0.0, 0.0, 0.001, 0.004, 0.012, 0.03)


@dataclass
class Noted:
    """What a launched step runs of one request, as it was then."""

    shadow: Request
    start: int
    num_unread: int
    output: list[int]
    block_table: list[int]

    def scheduled(self) -> ScheduledRequest:
        """Bring the shadow to that state."""
        shadow = self.shadow
        shadow.num_computed_tokens = self.start - self.num_unread
        shadow.num_launched_tokens = self.num_unread
        shadow.output_token_ids[:] = self.output
        shadow.block_table = self.block_table
        return ScheduledRequest(shadow, 1)

    @property
    def is_broken(self) -> bool:
        """Whether this step loses its numbers."""
        num_output = self.start + 1 - self.shadow.num_prompt_tokens
        return self.shadow.prompt_token_ids[0] == BROKEN and num_output == BROKEN_AT


@dataclass
class LaggingStep:
    """A launched step that the device's thread comes to in its turn."""

    done: Future[PendingStep]
    noted: list[Noted]
    idle_s: float | None = None

    def collect_sampled(self) -> list[StepResult] | None:
        return None

    def collect(self) -> list[StepResult]:
        """Wait for it."""
        results = self.done.result(60).collect()
        return [
            replace(result, sampled=None, is_failed=True) if item.is_broken else result
            for item, result in zip(self.noted, results, strict=True)
        ]


@dataclass
class Device:
    """The thread that steps and copies take their turns on."""

    pool: KVPool
    runner: GraphRunner
    lag: random.Random
    stream: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="device")
    )
    shadows: dict[Request, Request] = field(default_factory=dict)

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        after: LaggingStep | None = None,
        group_mean: int = 0,
        num_drafts: int | None = None,
    ) -> LaggingStep:
        """See `decode.loop.StepRunner`."""
        self.shadows = {item.request: self._shadow(item.request) for item in scheduled}
        noted = [
            Noted(
                shadow=self.shadows[item.request],
                start=item.start,
                num_unread=item.num_unread,
                output=list(item.request.output_token_ids),
                block_table=list(item.request.block_table),
            )
            for item in scheduled
        ]
        return LaggingStep(self.stream.submit(self._run, noted, after, group_mean), noted)

    def run_dummy(self, *, group_mean: int = 0, num_drafts: int | None = None) -> None:
        """See `decode.loop.StepRunner`."""
        self.stream.submit(self.runner.run_dummy, group_mean=group_mean)

    def copy_out(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Wait for all that was launched, as a copy from a GPU does."""
        return self.stream.submit(KVPool.copy_out, self.pool, block_ids).result(60)

    def copy_in(self, block_ids: Sequence[int], blocks: torch.Tensor) -> None:
        """Wait for nothing."""
        self.stream.submit(KVPool.copy_in, self.pool, list(block_ids), blocks)

    def _shadow(self, request: Request) -> Request:
        return self.shadows.get(request) or Request(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
        )

    def _run(self, noted: list[Noted], after: LaggingStep | None, group_mean: int) -> PendingStep:
        time.sleep(self.lag.choice(LAGS_S))
        scheduled = [item.scheduled() for item in noted]
        pending = self.runner.launch(
            scheduled, after=None if after is None else after.done.result(), group_mean=group_mean
        )
        for item in noted:
            if item.is_broken:
                block, offset = divmod(item.start, self.pool.block_size)
                self.pool.data[item.block_table[block], :, offset] = torch.nan
        return pending


def build_lagging(options: WorkerOptions) -> ModelSide:
    """Boot the rank as ever, then put the device's thread between loop and runner."""
    side = build_model_side(options)
    device = Device(side.kv_pool, fixed_runner(options, side), random.Random(options.rank))
    side.kv_pool.copy_out = device.copy_out  # type: ignore[method-assign]
    side.kv_pool.copy_in = device.copy_in  # type: ignore[method-assign]
    # Steps and the loops' meetings are on two threads now: each needs a communicator of its own.
    ep_group = side.groups.ep_group
    lockstep = side.lockstep
    if ep_group.size > 1:
        meeting = RankGroup(rank=ep_group.rank, size=ep_group.size, _group=dist.new_group())
        lockstep = create_lockstep(meeting, side.epoch)
    # Its steps are handed back to itself only.
    return replace(side, runner=device, lockstep=lockstep)  # type: ignore[arg-type]


def make_service(options: WorkerOptions) -> RankService:
    """The service of this rank."""
    return WorkerHost(options, DecodeDriver(options, build_lagging))


if __name__ == "__main__":
    sys.exit(run_worker("decode", sys.argv[1:], make_service))
