"""One decode rank: the real queue, block pool and scheduler, steps that last as measured."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from bench.tiers.shape import PairShape
from decode.admission import AdmissionQueue, GrowthEstimator
from decode.offload import HostBlockStore
from decode.requests import DecodeRequest
from decode.scheduler import DecodeScheduler
from engine.memory.block_pool import BlockPool
from worker.lifecycle import DecodeStatus

MAX_MODEL_LEN = 2**20


class _NoKV:
    """Blocks without contents."""

    def copy_out(self, block_ids: Sequence[int]) -> None:
        """Nothing to copy."""

    def is_done(self, blocks: None) -> bool:
        """It is."""
        return True

    def copy_in(self, block_ids: Sequence[int], blocks: None) -> None:
        """Nothing to copy."""

    def discard(self, blocks: None) -> None:
        """Nothing to forget."""


class DecodeSide:
    """Runs until it is cancelled."""

    def __init__(
        self,
        shape: PairShape,
        granted: Callable[[DecodeRequest], None],
        ended: Callable[[DecodeRequest], None],
        count: Callable[[int], None],
    ) -> None:
        """``granted`` has blocks, ``ended`` its last token; ``count`` hears of every step's."""
        self.pool = BlockPool(shape.decode_blocks + 1, shape.block_size)
        self.scheduler = DecodeScheduler(
            self.pool,
            HostBlockStore(_NoKV(), shape.host_blocks),
            max_num_seqs=shape.max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
        )
        self.num_here = 0
        self.num_preempted = 0
        self._shape, self._granted, self._ended, self._count = shape, granted, ended, count
        self._growth = GrowthEstimator(shape.block_size, MAX_MODEL_LEN)
        self._queue = AdmissionQueue()
        self._receiving: list[DecodeRequest] = []
        self._news = asyncio.Event()
        self._serials = itertools.count()

    def reserve(self) -> int:
        """A place for a request, and its number."""
        self.num_here += 1
        return next(self._serials)

    def claim(self, request: DecodeRequest) -> None:
        """Its turn in prefill is near."""
        request.move_to(DecodeStatus.CLAIMED)
        self._queue.push(request)
        self._admit()

    def arrived(self, request: DecodeRequest, first_token: int) -> None:
        """Its KV is here."""
        self._receiving.remove(request)
        request.request.num_computed_tokens = request.request.num_prompt_tokens
        request.request.output_token_ids.append(first_token)
        request.move_to(DecodeStatus.WAITING)
        self.scheduler.add(request)
        self._news.set()

    async def run(self) -> None:
        """Step after step."""
        while True:
            self._admit()
            plan = self.scheduler.schedule()
            self.num_preempted += len(plan.preempted)
            for request in plan.failed:
                raise RuntimeError(f"{request.request_id}: no room in the host's memory")
            if not plan.requests:
                if not self.scheduler.has_work:
                    self._news.clear()
                    await self._news.wait()
                continue
            size = len(plan.requests)
            seconds = self._shape.steps.decode_s(size)
            await asyncio.sleep(seconds)
            self.scheduler.steps.observe(size, seconds)
            for request in plan.requests:
                self.scheduler.land(request)
                if self.scheduler.append_token(request, 1) is not None:
                    inner = request.request
                    self._growth.observe(inner.num_output_tokens, inner.sampling)
                    self.scheduler.finish(request)
                    self.num_here -= 1
                    self._ended(request)
            self._count(size)

    def _admit(self) -> None:
        scheduler, growth = self.scheduler, self._growth
        if not len(self._queue):
            return
        holders = [*self._receiving, *scheduler.requests]
        headroom = sum(growth.expected_blocks(item.request) for item in holders)
        size = self._shape.block_size
        while True:

            def cost(request: DecodeRequest) -> int:
                inner = request.request
                return -(-(inner.num_prompt_tokens + 1) // size) + growth.expected_blocks(inner)

            budget = self.pool.num_free_blocks - headroom
            request = self._queue.pick(cost, budget, scheduler.away)
            if request is None:
                return
            expected = growth.expected_blocks(request.request)
            request.request.block_table = self.pool.allocate(cost(request) - expected)
            request.move_to(DecodeStatus.WAITING_FOR_KV)
            headroom += expected
            self._receiving.append(request)
            self._granted(request)
