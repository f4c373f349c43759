"""Continuous batching: which requests run in the next step, and who yields when blocks run out.

Pure: knows requests, block counts and a host store, never tensors. Requests are ordered by age
(`serial`). In a step every running request runs one token. A step may be chosen while the one
before it runs and its tokens are unknown: every running request is then taken to go on, but those
that the next token ends by its number. A request that turns out to be over lingers: it holds its
blocks until every step that runs it is over. Rules:

- Growth: a request that needs another block gets it, oldest first. If none is free, the youngest
  running request is preempted: its KV goes to host memory and its blocks are given back. On a GPU
  the copy takes a while (OFFLOADING); who waits for those blocks sits the steps out until then.
- If the host store cannot take the youngest, that request fails alone with OUT_OF_BLOCKS.
- A request that is alone with the pool and cannot grow fails alone with OUT_OF_BLOCKS. If others
  (waiting, or being received) hold the rest, it yields to host memory instead and comes back.
- Nothing is taken from a request that a launched step runs: where blocks run short, launched steps
  are completed first (`must_wait`), which may free some.
- Resume first: preempted requests return, oldest first, before a waiting one starts; only when
  nothing runs and none of them fits does a waiting one start, because then it holds what they need.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from decode.offload import HostStore
from decode.preempted import PreemptedRequests
from decode.requests import DecodeRequest, age_of
from engine.memory.block_pool import BlockPool
from engine.request import Request, ScheduledRequest
from runtime.errors import InternalError
from runtime.lifecycle import DecodeStatus
from runtime.sampling import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step does. `scheduled[i]` is the share of `requests[i]`.

    `preempted` and `resumed` are for counting; `failed` requests are FINISHED and hold nothing, and
    must be answered with OUT_OF_BLOCKS.
    """

    requests: tuple[DecodeRequest, ...] = ()
    scheduled: tuple[ScheduledRequest, ...] = ()
    started: tuple[DecodeRequest, ...] = ()
    preempted: tuple[DecodeRequest, ...] = ()
    resumed: tuple[DecodeRequest, ...] = ()
    failed: tuple[DecodeRequest, ...] = ()

    @property
    def num_tokens(self) -> int:
        """One a request."""
        return len(self.requests)


QUEUED = (
    DecodeStatus.WAITING,
    DecodeStatus.RUNNING,
    DecodeStatus.OFFLOADING,
    DecodeStatus.PREEMPTED,
)
"""The states that a request has while it is here."""


class DecodeScheduler:
    """The requests whose KV is complete. Used by the engine loop's thread only."""

    def __init__(
        self, pool: BlockPool, host: HostStore, *, max_num_seqs: int, max_model_len: int
    ) -> None:
        self._pool = pool
        self._away = PreemptedRequests(pool, host)
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self.waiting: list[DecodeRequest] = []
        self.running: list[DecodeRequest] = []
        self.lingering: list[DecodeRequest] = []  # FINISHED, and launched steps write their blocks

    @property
    def offloading(self) -> list[DecodeRequest]:
        """Preempted, and being copied to host memory; oldest first."""
        return self._away.offloading

    @property
    def preempted(self) -> list[DecodeRequest]:
        """In host memory, oldest first."""
        return self._away.preempted

    @property
    def has_work(self) -> bool:
        """Whether any request is here."""
        return bool(self.waiting or self.running or self.offloading or self.preempted)

    @property
    def requests(self) -> Sequence[DecodeRequest]:
        """All requests that are here."""
        return [*self.running, *self.offloading, *self.preempted, *self.waiting]

    @property
    def is_short(self) -> bool:
        """Whether requests wait to come back, so that nobody else may be let in."""
        return bool(self.offloading or self.preempted)

    @property
    def num_offloaded_blocks(self) -> int:
        """Blocks of preempted requests in host memory, or on their way there."""
        return self._away.num_blocks

    def add(self, request: DecodeRequest) -> None:
        """Take over a request in WAITING: KV of the prompt complete, first token known."""
        assert request.status is DecodeStatus.WAITING
        insort(self.waiting, request, key=age_of)

    def finish(self, request: DecodeRequest) -> None:
        """Take a request out, whatever its status here, and give back all that it holds.

        Its blocks come back later, if a launched step runs it.
        """
        queue = self._queue_of(request.status)
        queue.remove(request)
        if request.status in (DecodeStatus.OFFLOADING, DecodeStatus.PREEMPTED):
            self._away.drop(request)
        request.move_to(DecodeStatus.FINISHED)
        if request.request.num_launched_tokens:
            self.lingering.append(request)
        else:
            self._release_blocks(request)

    @property
    def must_wait(self) -> bool:
        """Whether the next step cannot be chosen before those that are launched are over."""
        if self._pool.can_allocate(len(self.running)):
            return False  # one token each never needs more
        is_any_launched = any(request.request.num_launched_tokens for request in self.running)
        return is_any_launched and not self._pool.can_allocate(
            sum(self._num_needed(request) for request in self._continuing())
        )

    def schedule(self) -> StepPlan:
        """Decide the next step; preempts, resumes and starts requests on the way.

        The step must be launched, and `land` called for each of its requests when it is over.
        """
        self._away.settle()
        preempted: list[DecodeRequest] = []
        failed: list[DecodeRequest] = []
        requests = self._continuing()
        for request in requests:
            if request.status is DecodeStatus.RUNNING and self._num_needed(request):
                self._grow(request, preempted, failed)
        is_short = bool(preempted or failed or self.offloading)
        resumed = [] if is_short else self._resume()
        started = self._start()
        if is_short or resumed or started:
            requests = [item for item in self._continuing() if not self._num_needed(item)]
        scheduled = [ScheduledRequest(item.request, 1) for item in requests]
        for item in scheduled:
            item.request.num_launched_tokens += 1
        return StepPlan(
            requests=tuple(requests),
            scheduled=tuple(scheduled),
            started=tuple(started),
            preempted=tuple(preempted),
            resumed=tuple(resumed),
            failed=tuple(failed),
        )

    def land(self, request: DecodeRequest) -> bool:
        """A step that ran the request is over; whether the request still is."""
        request.request.num_launched_tokens -= 1
        if request.status is DecodeStatus.RUNNING:
            return True
        if not request.request.num_launched_tokens:
            self.lingering.remove(request)
            self._release_blocks(request)
        return False

    def append_token(self, request: DecodeRequest, token_id: int) -> FinishReason | None:
        """Book the outcome of a step for a request that landed; whether `token_id` ends it."""
        assert request.status is DecodeStatus.RUNNING
        inner = request.request
        inner.num_computed_tokens += 1
        self._commit_last_block(request)
        inner.output_token_ids.append(token_id)
        return inner.finish_reason(self._max_model_len)

    def check_integrity(self) -> None:
        """Raise InternalError if a queue holds a request of another status or order.

        Or if host memory holds other KV than that of the preempted requests.
        """
        self._away.check_integrity()
        for request in self.lingering:
            if request.status is not DecodeStatus.FINISHED or not request.request.block_table:
                raise InternalError("a request lingers without a reason")
        for status in QUEUED:
            queue = self._queue_of(status)
            if any(request.status is not status for request in queue):
                raise InternalError(f"a request in queue {status.value} has another status")
            if sorted(queue, key=age_of) != queue:
                raise InternalError(f"queue {status.value} is not ordered by age")

    def _queue_of(self, status: DecodeStatus) -> list[DecodeRequest]:
        queues = {
            DecodeStatus.WAITING: self.waiting,
            DecodeStatus.RUNNING: self.running,
            DecodeStatus.OFFLOADING: self.offloading,
            DecodeStatus.PREEMPTED: self.preempted,
        }
        return queues[status]

    def _continuing(self) -> list[DecodeRequest]:
        """Return the running requests that launched steps do not end by the number of tokens."""
        return [request for request in self.running if self._goes_on(request.request)]

    def _goes_on(self, inner: Request) -> bool:
        if not inner.num_launched_tokens:
            return True
        # With the token that the launched step samples.
        num_tokens = inner.num_computed_tokens + inner.num_launched_tokens + 1
        num_output = num_tokens - len(inner.prompt_token_ids)
        return num_output < inner.sampling.max_tokens and num_tokens < self._max_model_len

    def _num_needed(self, request: DecodeRequest) -> int:
        return request.request.num_blocks_needed(1, self._pool.block_size)

    def _grow(
        self, request: DecodeRequest, preempted: list[DecodeRequest], failed: list[DecodeRequest]
    ) -> None:
        """Give `request` the block for its next token, at the cost of the youngest if need be.

        It has none afterwards where it is itself preempted or failed, or where the blocks that it
        is to get are still being copied.
        """
        num_needed = self._num_needed(request)
        while not self._pool.can_allocate(num_needed):
            if self.offloading:
                return
            victim = self.running[-1]
            if self._can_preempt(victim):
                self.running.remove(victim)
                self._away.take(victim)
                preempted.append(victim)
                self._away.settle()
            else:
                self.finish(victim)
                failed.append(victim)
            if victim is request:
                return
        request.request.block_table += self._pool.allocate(num_needed)

    def _can_preempt(self, victim: DecodeRequest) -> bool:
        held = victim.request.block_table
        num_held_by_all = self._pool.num_usable_blocks - self._pool.num_free_blocks
        alone = len(self.running) == 1 and num_held_by_all <= len(held)
        return not alone and self._away.can_take(victim)

    def _resume(self) -> list[DecodeRequest]:
        """Bring preempted requests back, oldest first, while they fit with a block to spare each.

        The spare block of every running request, its own included, keeps a resumed one from being
        preempted again in the next step. Where nothing runs it comes back without: nobody is going
        to give it more room.
        """
        resumed: list[DecodeRequest] = []
        num_places = self._max_num_seqs - len(self._continuing()) if self.preempted else 0
        while self.preempted and len(resumed) < num_places:
            request = self.preempted[0]
            num_needed = self._num_needed(request)
            num_spare = len(self.running) + 1 if self.running else 0
            if not self._pool.can_allocate(num_needed + num_spare):
                break
            self._away.restore(request, num_needed)
            insort(self.running, request, key=age_of)
            resumed.append(request)
        return resumed

    def _start(self) -> list[DecodeRequest]:
        """Start waiting requests; those whose grammar is still being compiled let others pass."""
        started: list[DecodeRequest] = []
        if self.is_short and self.running:
            return started
        num_places = self._max_num_seqs - len(self._continuing()) if self.waiting else 0
        ready = [item for item in self.waiting if item.request.is_ready]
        for request in ready[: max(num_places, 0)]:
            self.waiting.remove(request)
            # The ticket allocated room for the first generated token, which this step computes.
            assert self._num_needed(request) == 0
            request.move_to(DecodeStatus.RUNNING)
            insort(self.running, request, key=age_of)
            started.append(request)
        return started

    def _commit_last_block(self, request: DecodeRequest) -> None:
        """Make the block that the last step filled findable, for prompts that repeat the output."""
        inner = request.request
        num_whole, rest = divmod(inner.num_computed_tokens, self._pool.block_size)
        if rest == 0:
            hashes = inner.update_block_hashes(self._pool.block_size)
            index = num_whole - 1
            self._pool.commit([inner.block_table[index]], [hashes[index]])

    def _release_blocks(self, request: DecodeRequest) -> None:
        block_ids, request.request.block_table = request.request.block_table, []
        self._pool.release(block_ids)
