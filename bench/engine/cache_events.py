"""What it costs a worker that routers follow its prefix cache: microseconds of CPU a step.

    python -m bench.engine.cache_events [--steps 1000] [--followers 1 4] [--step-ms 20]

A real block pool of 10,000 blocks, its feed, log and service, and steps as an engine loop has them,
on a thread of their own; followers read frames as gRPC would send them, so only gRPC's own work is
left out. The same requests come with and without followers: `loop_us` is the engine loop's thread
(events kept and handed over), `loop_beside_us` the event loop's of the same process, with which it
shares the interpreter; it is woken by every step without followers, too, as tokens do. No GPU:
steps are waited for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import queue
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc.aio

from engine.memory.block_pool import BlockPool
from runtime.pb import cache_pb2, registry_pb2
from runtime.wire import identity
from worker.cache_log import CacheFeed
from worker.cache_service import CacheService

NUM_BLOCKS = 10_000
BLOCK_SIZE = 64
NUM_KNOWN = 500
"""Contexts that later ones may go on with."""
WORKER = identity("bench", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a step does to the pool, in the mean; blocks of 64 tokens.

    Attributes:
        arrivals: contexts that begin to hold blocks.
        hit_rate: share of them that go on with one that was there before.
        num_prefix: blocks that those have in common with it, if they are still there.
        num_new: blocks of their own, which become findable.
        num_grown: blocks that fill up behind contexts that are held.
        steps_held: until its blocks are released.
    """

    arrivals: float
    hit_rate: float
    num_prefix: int
    num_new: int
    num_grown: int
    steps_held: int


SHAPES = {
    # A step of 4,096 new tokens, behind 9,600 cached ones in seven of ten.
    "prefill": Shape(
        arrivals=1.0, hit_rate=0.7, num_prefix=150, num_new=64, num_grown=0, steps_held=3
    ),
    # 128 requests of 2,560 tokens and 300 of output.
    "decode": Shape(
        arrivals=128 / 300, hit_rate=0.6, num_prefix=24, num_new=16, num_grown=2, steps_held=300
    ),
}


class Traffic:
    """Contexts that come and go."""

    def __init__(self, pool: BlockPool, shape: Shape) -> None:
        self._pool, self._shape = pool, shape
        self._source = random.Random(0)
        self._known: deque[list[bytes]] = deque(maxlen=NUM_KNOWN)
        self._held: deque[tuple[int, list[int]]] = deque()
        self._num_steps = 0
        self._due = 0.0
        self.num_events = 0
        """Blocks that became findable, or are so no more."""

    def step(self) -> None:
        """What one step does."""
        self._num_steps += 1
        while self._held and self._held[0][0] <= self._num_steps:
            self._pool.release(self._held.popleft()[1])
        self._due += self._shape.arrivals
        while self._due >= 1.0:
            self._due -= 1.0
            self._arrive()
        for _ in range(min(self._shape.num_grown, len(self._held))):
            blocks = self._source.choice(self._held)[1]
            blocks += self._store([self._source.randbytes(16)])

    def _arrive(self) -> None:
        shape, source, pool = self._shape, self._source, self._pool
        prefix: list[bytes] = []
        if self._known and source.random() < shape.hit_rate:
            prefix = source.choice(self._known)[: shape.num_prefix]
        found = pool.match_prefix(prefix)
        new = [source.randbytes(16) for _ in range(shape.num_new)]
        hashes = prefix + new
        blocks = found + self._store(hashes[len(found) :])
        self._known.append(hashes)
        self._held.append((self._num_steps + shape.steps_held, blocks))

    def _store(self, hashes: Sequence[bytes]) -> list[int]:
        before = self._pool.num_cached_blocks
        blocks = self._pool.allocate(len(hashes))
        evicted = before - self._pool.num_cached_blocks
        self._pool.commit(blocks, hashes)
        self.num_events += evicted + len(hashes)
        return blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one step; microseconds of CPU."""

    role: str
    followers: int
    events: float
    """Blocks stored or removed."""
    pool_us: float
    """The engine loop's thread: the pool's own work, events kept and handed over; the median."""
    beside_us: float
    """The event loop's thread: log and frames; the mean."""
    frames: int
    start_us: float
    """Once, when the first follower comes: the engine loop lists all blocks."""


class _Context:
    """Stands for gRPC's: nothing is asked of it by a call that is served."""


class Worker:
    """A pool, its feed and its service; the engine loop's thread calls `step`."""

    def __init__(self, shape: Shape) -> None:
        self.pool = BlockPool(NUM_BLOCKS + 1, BLOCK_SIZE)
        self.traffic = Traffic(self.pool, shape)
        self.start_us = 0.0
        self.num_frames = 0
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.feed = CacheFeed(self.pool, self._posted.put, linger_s=0.0)
        self._service = CacheService(WORKER, self.feed, registry_pb2.WorkerLoad)

    def step(self) -> float:
        """One step; seconds of this thread's CPU."""
        while not self._posted.empty():
            work = self._posted.get()
            start = time.thread_time()
            work()
            self.start_us = max(self.start_us, 1e6 * (time.thread_time() - start))
        start = time.thread_time()
        self.traffic.step()
        self.feed.tell()
        return time.thread_time() - start

    async def follow(self) -> None:
        """What one router's call does here, until cancelled."""
        request = cache_pb2.FollowRequest(router_id="bench", worker=WORKER)
        context: grpc.aio.ServicerContext = _Context()  # type: ignore[assignment,type-arg]
        async for frame in self._service.Follow(request, context):
            frame.SerializeToString()
            self.num_frames += 1


async def measure(role: str, followers: int, steps: int, step_s: float) -> Cost:
    """One run."""
    worker = Worker(SHAPES[role])
    for _ in range(2 * NUM_BLOCKS // 64):  # caches are full, and evict
        worker.traffic.step()
    calls = [asyncio.create_task(worker.follow()) for _ in range(followers)]
    await asyncio.sleep(0)
    seconds: list[float] = []
    told: deque[None] = deque(maxlen=1)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    events_before = worker.traffic.num_events

    def run() -> None:
        for _ in range(steps):
            seconds.append(worker.step())
            loop.call_soon_threadsafe(told.append, None)  # its tokens
            time.sleep(step_s)
        loop.call_soon_threadsafe(ended.set)

    before = time.thread_time()
    thread = threading.Thread(target=run)
    thread.start()
    await ended.wait()
    beside_s = time.thread_time() - before
    thread.join()
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    return Cost(
        role=role,
        followers=followers,
        events=round((worker.traffic.num_events - events_before) / steps, 1),
        pool_us=round(1e6 * statistics.median(seconds), 1),
        beside_us=round(1e6 * beside_s / steps, 1),
        frames=worker.num_frames,
        start_us=round(worker.start_us, 1),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print one JSON object a run; followers cost what they add to none."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.cache_events", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--followers", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args(arguments)
    for role in SHAPES:
        alone: Cost | None = None
        for followers in (0, *options.followers):
            cost = asyncio.run(measure(role, followers, options.steps, options.step_ms / 1e3))
            alone = alone or cost
            row = {name: getattr(cost, name) for name in Cost.__slots__}
            row["loop_us"] = round(cost.pool_us - alone.pool_us, 1)
            row["loop_beside_us"] = round(cost.beside_us - alone.beside_us, 1)
            row["python"] = platform.python_version()
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
