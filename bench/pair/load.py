"""The load of a phase: requests kept in flight, sent at random moments, or all at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.pair.client import RequestLog, Target, clock, send

_TICK_S = 0.05


@dataclass(slots=True, kw_only=True)
class Load:
    """Sends requests of one size to ``target``; every prompt is another, drawn from ``seed``."""

    target: Target
    vocab_size: int
    prompt_len: int
    max_tokens: int
    seed: int
    logs: list[RequestLog] = field(default_factory=list)
    """Of the requests that have ended."""
    _random: random.Random = field(init=False)
    _stopped: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    async def burst(self, count: int) -> None:
        """Send so many requests at once and wait for all answers."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(self._one())

    async def window(
        self, *, in_flight: int, rate: float, warm_up_s: float, seconds: float
    ) -> tuple[float, float]:
        """Load the target, and return the moments between which it was in its steady state.

        Returns when all answers are complete. The steady state begins after ``warm_up_s``, and not
        before as many requests have ended as are in flight.

        Args:
            in_flight: requests that are always in flight, if ``rate`` is 0.
            rate: requests per second, at random moments.
            warm_up_s: see above.
            seconds: between the two moments.
        """
        async with asyncio.TaskGroup() as tasks:
            if rate:
                tasks.create_task(self._arrive(rate, tasks))
            else:
                for _ in range(in_flight):
                    tasks.create_task(self._repeat())
            await asyncio.sleep(warm_up_s)
            while not rate and len(self.logs) < in_flight:
                await asyncio.sleep(_TICK_S)
            began = clock()
            await asyncio.sleep(seconds)
            self._stopped = True
            ended = clock()
        return began, ended

    async def _repeat(self) -> None:
        while not self._stopped:
            log = await self._one()
            if log.error:
                await asyncio.sleep(_TICK_S)  # a broken target is not asked as fast as it refuses

    async def _arrive(self, rate: float, tasks: asyncio.TaskGroup) -> None:
        for due in self._moments(rate, clock()):
            await asyncio.sleep(max(0.0, due - clock()))
            if self._stopped:
                return
            tasks.create_task(self._one())

    def _moments(self, rate: float, now: float) -> Iterator[float]:
        """A Poisson process."""
        while True:
            now += self._random.expovariate(rate)
            yield now

    async def _one(self) -> RequestLog:
        prompt = self._random.choices(range(self.vocab_size), k=self.prompt_len)
        seed = self._random.getrandbits(32)
        log = await send(self.target, prompt, self.max_tokens, seed=seed)
        self.logs.append(log)
        return log
