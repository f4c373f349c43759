"""Simulated workers: real block pools, a queue, and how long things take.

Prefill computes one request after the other, first come first served, at so many tokens a second;
a decode rank runs all that it has room for, a step every so often. Both report as workers do.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.step_times import H200_PROMPTS, StepTimes
from engine.memory.block_pool import BlockPool
from engine.memory.events import BlockStored, CacheEvent
from router.pool.members import WorkerKey, WorkerLoad
from router.pool.prefix_index import PrefixIndex
from runtime.block_hash import max_cached_blocks

BLOCK_SIZE = 64
Schedule = Callable[[float, Callable[[], None]], None]
"""Have something happen after so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Of all workers, DeepSeek-V3 shapes."""

    steps: StepTimes = H200_PROMPTS
    kv_token_bytes: int = 70_272
    kv_bytes_per_s: float = 40e9
    report_s: float = 0.025
    """From what happens to the router's knowing it."""
    prefill_blocks: int = 9_000
    decode_blocks: int = 9_000
    decode_requests: int = 128


@dataclass(slots=True, eq=False)
class Job:
    """One request in the engines."""

    hashes: list[bytes]
    num_tokens: int
    num_output_tokens: int
    arrived_s: float
    decode: DecodeEngine
    on_first: Callable[[Job], None]
    on_end: Callable[[Job], None]
    num_cached: int = 0
    blocks: list[int] = field(default_factory=list)
    decode_blocks: list[int] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """Of the context."""
        return -(-self.num_tokens // BLOCK_SIZE)


class Engine:
    """What both roles share: a pool, reports, counters."""

    def __init__(
        self,
        key: WorkerKey,
        num_blocks: int,
        speeds: Speeds,
        schedule: Schedule,
        clock: Callable[[], float],
        *,
        index: PrefixIndex,
        report: Callable[[WorkerKey, WorkerLoad], None],
    ) -> None:
        self.key = key
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, record_events=True)
        self.speeds, self.schedule, self.clock = speeds, schedule, clock
        self.busy_s = 0.0
        self.num_tokens = 0
        self._index, self._report = index, report
        self._sequence = itertools.count(1)
        self._is_telling = False

    def load(self) -> WorkerLoad:
        """As of now."""
        raise NotImplementedError

    def tell(self) -> None:
        """Events and load reach the router a moment later; what happens meanwhile goes along."""
        if not self._is_telling:
            self._is_telling = True
            self.schedule(self.speeds.report_s, self._deliver)

    def heartbeat(self) -> None:
        """What a stream without news says now and then."""
        self._report(self.key, self.load())

    def _deliver(self) -> None:
        self._is_telling = False
        for event in self.pool.take_events():
            self._apply(event)
        self._report(self.key, self.load())

    def _apply(self, event: CacheEvent) -> None:
        if isinstance(event, BlockStored):
            self._index.store(self.key, (event.block_hash,))
        else:
            self._index.discard(self.key, (event.block_hash,))  # type: ignore[union-attr]


class PrefillEngine(Engine):
    """One at a time."""

    queue: deque[Job]
    running: Job | None = None
    num_prompt_tokens = 0
    num_cached_tokens = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.queue = deque()

    def add(self, job: Job) -> None:
        """Queue it."""
        self.queue.append(job)
        self.start()
        self.tell()

    def start(self) -> None:
        """Begin the first whose decode rank has room; those behind may pass it."""
        if self.running is not None:
            return
        for job in self.queue:
            if job.decode.take(job):
                break
        else:
            return
        self.queue.remove(job)
        self.running = job
        most = max_cached_blocks(job.num_tokens, BLOCK_SIZE)
        found = self.pool.match_prefix(job.hashes[:most])
        job.num_cached = len(found) * BLOCK_SIZE
        job.blocks = found + self.pool.allocate(job.num_blocks - len(found))
        num_new = job.num_tokens - job.num_cached
        self.num_prompt_tokens += job.num_tokens
        self.num_cached_tokens += job.num_cached
        seconds = self.speeds.steps.prefill_s(num_new)
        self.schedule(seconds, lambda: self._end(job, num_new, seconds))

    def load(self) -> WorkerLoad:
        """Tokens that wait, those of the running one included."""
        left = sum(job.num_tokens - self._cached(job) for job in self.queue)
        left += self.running.num_tokens - self.running.num_cached if self.running else 0
        return WorkerLoad(
            num_requests_running=self.running is not None,
            num_requests_waiting=len(self.queue),
            num_tokens_waiting=left,
            num_free_blocks=self.pool.num_free_blocks,
            num_total_blocks=self.pool.num_usable_blocks,
            sequence=next(self._sequence),
            num_tokens_done=self.num_tokens,
            busy_s=self.busy_s,
            clock_s=1.0 + self.clock(),
        )

    def _cached(self, job: Job) -> int:
        most = max_cached_blocks(job.num_tokens, BLOCK_SIZE)
        return self.pool.count_prefix(job.hashes[:most]) * BLOCK_SIZE

    def _end(self, job: Job, num_new: int, seconds: float) -> None:
        self.running = None
        self.busy_s += seconds
        self.num_tokens += num_new
        self.pool.commit(job.blocks[: len(job.hashes)], job.hashes)
        self.pool.release(job.blocks)
        job.on_first(job)
        job.decode.receive(job, seconds)
        self.start()
        self.tell()


class DecodeEngine(Engine):
    """All at once."""

    num_running = 0
    num_done = 0
    waiters: list[PrefillEngine]

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.waiters = []

    def take(self, job: Job) -> bool:
        """Give it blocks for all its tokens, if there is room."""
        total = -(-(job.num_tokens + job.num_output_tokens) // BLOCK_SIZE)
        found = self.pool.match_prefix(job.hashes)
        is_full = self.num_running >= self.speeds.decode_requests
        if is_full or not self.pool.can_allocate(total - len(found)):
            self.pool.release(found)
            return False
        job.decode_blocks = found + self.pool.allocate(total - len(found))
        self.num_running += 1
        self.tell()
        return True

    def receive(self, job: Job, compute_s: float) -> None:
        """Its prompt is computed, and its KV comes."""
        num_bytes = job.num_tokens * self.speeds.kv_token_bytes
        transfer_s = max(0.0, num_bytes / self.speeds.kv_bytes_per_s - compute_s)
        seconds = transfer_s + job.num_output_tokens * self.speeds.steps.decode_s(
            self.speeds.decode_requests
        )
        self.schedule(seconds, lambda: self._end(job))

    def load(self) -> WorkerLoad:
        """Requests and blocks."""
        return WorkerLoad(
            num_requests_running=self.num_running,
            num_free_blocks=self.pool.num_free_blocks,
            num_total_blocks=self.pool.num_usable_blocks,
            sequence=next(self._sequence),
            num_requests_done=self.num_done,
            clock_s=1.0 + self.clock(),
        )

    def _end(self, job: Job) -> None:
        self.num_running -= 1
        self.num_done += 1
        self.pool.commit(job.decode_blocks[: len(job.hashes)], job.hashes)
        self.pool.release(job.decode_blocks)
        job.on_end(job)
        for prefill in self.waiters:
            prefill.start()
        self.tell()
