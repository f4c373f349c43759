"""Greedy streams against a cluster, judged against the oracle's text: for tests that disturb it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import aiohttp

from engine.generate import generate
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from runtime.sampling import SamplingParams
from tests.integration.client import stream

STAGGER_S = 0.3
"""Lanes begin so far apart, so that their streams are not all at the same token."""


@dataclass(slots=True)
class OracleLoad:
    """Streams of some prompts at one router, and what became of them."""

    base_url: str
    prompts: list[list[int]]
    expected: list[list[int]]
    num_tokens: int
    seconds: list[float] = field(default_factory=list)
    """Each stream took."""
    lost: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    num_over: int = 0
    _is_over: bool = False

    @property
    def wrong(self) -> list[str]:
        """All that were not as the oracle says."""
        return self.lost + self.different

    async def run(self, num_requests: int, concurrency: int) -> None:
        """So many streams, of prompts that are drawn."""
        draw = random.Random(num_requests)
        gate = asyncio.Semaphore(concurrency)
        async with self._session() as session, asyncio.TaskGroup() as group:
            for _ in range(num_requests):
                await gate.acquire()
                task = group.create_task(self.one(session, draw.randrange(len(self.prompts))))
                task.add_done_callback(lambda _: gate.release())

    @contextlib.asynccontextmanager
    async def under_way(self, num_lanes: int) -> AsyncIterator[None]:
        """Streams come and go in the block, one after the other in each lane; then all are over."""
        async with self._session() as session, asyncio.TaskGroup() as group:
            for lane in range(num_lanes):
                group.create_task(self._lane(session, lane))
            try:
                yield
            finally:
                self._is_over = True

    async def some_more(self, count: int) -> None:
        """Wait until so many streams more are over."""
        target = self.num_over + count
        async with asyncio.timeout(120):
            while self.num_over < target:
                await asyncio.sleep(0.05)

    async def one(self, session: aiohttp.ClientSession, which: int) -> None:
        """One stream, judged."""
        begun = time.monotonic()
        answer = await stream(
            session,
            self.prompts[which],
            model="tandem-python",
            max_tokens=self.num_tokens,
            ignore_eos=True,
            temperature=0,
        )
        self.seconds.append(time.monotonic() - begun)
        self.num_over += 1
        if answer.error is not None:
            self.lost.append(f"{answer.request_id}: {answer.error}")
        elif answer.token_ids != self.expected[which]:
            self.different.append(
                f"{answer.request_id}: {answer.token_ids} instead of {self.expected[which]}"
            )

    def quantile(self, share: float) -> float:
        """Of the seconds."""
        return sorted(self.seconds)[int(share * (len(self.seconds) - 1))]

    async def _lane(self, session: aiohttp.ClientSession, lane: int) -> None:
        await asyncio.sleep(STAGGER_S * lane)
        which = lane
        while not self._is_over:
            await self.one(session, which % len(self.prompts))
            which += 1

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            self.base_url,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=600),
        )


def make_loads(
    base_urls: Sequence[str],
    oracle: DeepseekV3ForCausalLM,
    *,
    num_prompts: int,
    num_tokens: int,
) -> list[OracleLoad]:
    """The same prompts for each address; the oracle generates once."""
    draw = random.Random(41)
    lengths = [draw.randrange(1, 200) for _ in range(num_prompts)]
    prompts = [[draw.randrange(300, 4000) for _ in range(n)] for n in lengths]
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens)
    expected = [output.token_ids for output in generate(oracle, prompts, [greedy] * num_prompts)]
    return [OracleLoad(url, prompts, expected, num_tokens) for url in base_urls]
