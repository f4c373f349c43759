"""One prefill instance: the real scheduler, steps that last as long as they were measured to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bench.tiers.shape import PairShape
from engine.memory.block_pool import BlockPool
from prefill.request import Chunk, Grant, PrefillRequest
from prefill.scheduler import Scheduler


class PrefillSide:
    """Runs until it is cancelled; ``ask`` takes a request that needs a ticket."""

    def __init__(
        self,
        shape: PairShape,
        ask: Callable[[PrefillRequest], None],
        computed: Callable[[PrefillRequest], None],
    ) -> None:
        self.scheduler = Scheduler(
            BlockPool(shape.prefill_blocks + 1, shape.block_size),
            max_num_seqs=shape.prefill_seqs,
            max_num_batched_tokens=shape.batch_tokens,
        )
        self._shape, self._ask, self._computed = shape, ask, computed
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def add(self, item: PrefillRequest) -> None:
        """A request has come."""
        self.scheduler.add(item)
        self._want()

    def grant(self, item: PrefillRequest, grant: Grant) -> None:
        """Decode has room for it."""
        self.scheduler.grant(item, grant)
        self._news.set()

    def sent(self, item: PrefillRequest) -> None:
        """Its KV is in decode."""
        self.scheduler.finish(item)
        self._want()

    async def run(self) -> None:
        """Step after step."""
        while True:
            chunks = self.scheduler.schedule(self._loop.time())
            self._want()
            if not chunks:
                self._news.clear()
                # Claims that take long let others pass: look again.
                self._loop.call_later(0.1, self._want)
                await self._news.wait()
                continue
            num_tokens = sum(chunk.scheduled.num_scheduled_tokens for chunk in chunks)
            seconds = self._shape.steps.prefill_s(num_tokens)
            await asyncio.sleep(seconds)
            self.scheduler.steps.observe(num_tokens, seconds)
            self._advance(chunks)

    def _advance(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self.scheduler.advance(chunk)
            if chunk.is_last:
                self.scheduler.stop(chunk.item)
                self._computed(chunk.item)

    def _want(self) -> None:
        for item in self.scheduler.claim(self._loop.time()):
            self._ask(item)
        self._news.set()
