"""Continuous batching: which requests run in the next step, and who yields when blocks run out.

Pure: knows requests, block counts and a host store, never tensors. Requests are ordered by tier of
service, priority and age (`place_of`), by age alone where there are no tiers; "first" and "last"
are meant so. In a step every running request runs one token. A step may be chosen while the one
before it runs and its tokens are unknown: every running request is then taken to go on, but those
that the next token ends by its number. A request that turns out to be over lingers: it holds its
blocks until every step that runs it is over. Rules:

- Growth: a request that needs another block gets it, the first of them first. With drafts a step
  gives one token or more, and blocks are reserved for as many as launched steps may give; for its
  drafts a request gets blocks that nobody else needs, and gives them back. If none is free, the
  last running request is preempted: its KV goes to host memory and its blocks are given back. On a
  GPU the copy takes a while (OFFLOADING); who waits for those blocks sits the steps out until then.
- If the host store cannot take the last, that request fails alone with OUT_OF_BLOCKS.
- A request that is alone with the pool and cannot grow fails alone with OUT_OF_BLOCKS. If others
  (waiting, or being received) hold the rest, it yields to host memory instead and comes back.
- Nothing is taken from a request that a launched step runs: where blocks run short, launched steps
  are completed first (`must_wait`), which may free some.
- Resume first: preempted requests return, the first of them first, before a waiting one of their
  tier, or of one behind, starts; only when nothing runs and none of them fits does a waiting one
  start, because then it holds what they need.
- Places: where several tiers are here, `tier_places` says how many of each may run. Who is one too
  many is parked: he keeps his blocks, unless they are needed, and waits for a place.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from decode.draft_blocks import DraftBlocks, DraftSteps
from decode.offload import HostStore
from decode.preempted import PreemptedRequests
from decode.requests import DecodeRequest, place_of
from decode.tier_places import START_MARGIN, Places, has_tiers, last_to_yield
from engine.memory.block_pool import BlockPool
from engine.request import Request, ScheduledRequest
from runtime.errors import InternalError
from runtime.metrics.step_time import StepTime
from runtime.sampling import FinishReason
from worker.lifecycle import DecodeStatus


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
        self,
        pool: BlockPool,
        host: HostStore,
        *,
        max_num_seqs: int,
        max_model_len: int,
        drafts: DraftSteps | None = None,
    ) -> None:
        self._pool, self._max_num_seqs, self._max_model_len = pool, max_num_seqs, max_model_len
        self._blocks = DraftBlocks(pool, max_model_len, drafts or DraftSteps())
        self._away = PreemptedRequests(pool, host)
        self.steps = StepTime()
        """Of the steps that were run; whoever runs them tells it."""
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
    def away(self) -> Sequence[DecodeRequest]:
        """Requests that wait to come back: nobody of their tiers, or behind, may be let in."""
        return sorted([*self.offloading, *self.preempted], key=place_of)

    @property
    def num_offloaded_blocks(self) -> int:
        """Blocks of preempted requests in host memory, or on their way there."""
        return self._away.num_blocks

    def add(self, request: DecodeRequest) -> None:
        """Take over a request in WAITING: KV of the prompt complete, first token known."""
        assert request.status is DecodeStatus.WAITING
        insort(self.waiting, request, key=place_of)

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
            _release_blocks(request, self._pool)

    @property
    def must_wait(self) -> bool:
        """Whether the next step cannot be chosen before those that are launched are over."""
        if not any(request.request.num_launched_tokens for request in self.running):
            return False
        return not self._blocks.are_enough(self.running, self._continuing, self.requests)

    def schedule(self) -> StepPlan:
        """Decide the next step; preempts, resumes and starts requests on the way.

        The step must be launched, and `land` called for each of its requests when it is over.
        """
        self._away.settle()
        is_parked = self._park()
        preempted: list[DecodeRequest] = []
        failed: list[DecodeRequest] = []
        requests = self._continuing()
        for request in requests:
            if request.status is DecodeStatus.RUNNING and self._blocks.num_needed(request):
                self._grow(request, preempted, failed)
        is_short = bool(preempted or failed or self.offloading)
        resumed = [] if is_short else self._resume()
        begun = self._start()
        started = [item for item in begun if not item.is_parked]
        for request in begun:
            request.is_parked = False
        if is_short or resumed or begun or is_parked:
            requests = [item for item in self._continuing() if not self._blocks.num_needed(item)]
        requests = [item for item in requests if item.request.is_ready]
        self._blocks.reach_ahead(requests, num_spare=len(self.running))
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
        request.request.is_held &= request.request.num_launched_tokens > 0
        if request.status is not DecodeStatus.FINISHED:
            return True
        if not request.request.num_launched_tokens:
            self.lingering.remove(request)
            _release_blocks(request, self._pool)
        return False

    def append_token(self, request: DecodeRequest, token_id: int) -> FinishReason | None:
        """Book the outcome of a step for a request that landed; whether `token_id` ends it."""
        assert request.status in (DecodeStatus.RUNNING, DecodeStatus.WAITING)
        inner = request.request
        inner.num_computed_tokens += 1
        _commit_last_block(inner, self._pool)
        inner.output_token_ids.append(token_id)
        inner.draft_token_ids = ()
        return inner.finish_reason(self._max_model_len)

    def check_integrity(self) -> None:
        """Raise InternalError if a queue holds a request of another status or order.

        Or if host memory holds other KV than that of the preempted requests.
        """
        self._away.check_integrity()
        _check_queues(self._queues, self.lingering)

    def _queue_of(self, status: DecodeStatus) -> list[DecodeRequest]:
        return self._queues[QUEUED.index(status)]

    @property
    def _queues(self) -> Sequence[list[DecodeRequest]]:
        """As ``QUEUED`` names them."""
        return self.waiting, self.running, self.offloading, self.preempted

    def _continuing(self) -> list[DecodeRequest]:
        """Return the running requests that launched steps do not end by the number of tokens."""
        return [item for item in self.running if _goes_on(item.request, self._max_model_len)]

    def _places(self, others: Sequence[DecodeRequest], margin: float = 1.0) -> Places:
        """Of those that run and these."""
        running, most = self._continuing(), self._max_num_seqs
        return Places([*self.running, *others], running, most, self.steps, margin=margin)

    def _park(self) -> bool:
        """Have requests of tiers behind wait, where those before need places or shorter steps."""
        if not has_tiers(self._queues):
            return False
        leaving = self._places([*self.waiting, *self.preempted]).too_many(self._continuing())
        for request in leaving:
            self.running.remove(request)
            request.move_to(DecodeStatus.WAITING)
            request.is_parked = True
            insort(self.waiting, request, key=place_of)
        return bool(leaving)

    def _grow(
        self, request: DecodeRequest, preempted: list[DecodeRequest], failed: list[DecodeRequest]
    ) -> None:
        """Give `request` the block for its next token, at the cost of the last if need be.

        It has none afterwards where it is itself preempted or failed, or where the blocks that it
        is to get are still being copied.
        """
        num_needed = self._blocks.num_needed(request)
        if not self._pool.can_allocate(num_needed):
            self._blocks.give_back(self.running)
        while not self._pool.can_allocate(num_needed):
            if self.offloading:
                return
            victim = last_to_yield(self.running, self.waiting)
            if self._can_preempt(victim):
                self._queue_of(victim.status).remove(victim)
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
        """Bring preempted requests back, in order, while they fit with a block to spare each.

        The spare block of every running request, its own included, keeps a resumed one from being
        preempted again in the next step. Where nothing runs it comes back without: nobody is going
        to give it more room.
        """
        resumed: list[DecodeRequest] = []
        if not self.preempted:
            return resumed
        places = self._places([*self.waiting, *self.preempted], START_MARGIN)
        for request in tuple(self.preempted):
            if not places.has_one(request):
                continue
            num_needed = self._blocks.num_needed(request)
            num_spare = len(self.running) + 1 if self.running else 0
            if not self._pool.can_allocate(num_needed + num_spare):
                break
            self._away.restore(request, num_needed)
            places.take(request)
            insort(self.running, request, key=place_of)
            resumed.append(request)
        return resumed

    def _start(self) -> list[DecodeRequest]:
        """Start waiting requests; who has no room, or no grammar yet, lets others by."""
        started: list[DecodeRequest] = []
        if not self.waiting or len(self._continuing()) >= self._max_num_seqs:
            return started
        away = self.away if self.running else ()
        closed = away[0].standing.order if away else math.inf
        ready = [item for item in self.waiting if item.request.is_ready]
        places = self._places(ready, START_MARGIN)
        for request in ready:
            if places.are_all_taken or request.standing.order >= closed:
                break
            has_room = places.has_one(request) and _has_room(request, self._pool)
            # Where nothing runs, the next step takes the blocks that it needs from the last.
            if not has_room and (self.running or request.request.num_launched_tokens):
                continue
            self.waiting.remove(request)
            request.move_to(DecodeStatus.RUNNING)
            insort(self.running, request, key=place_of)
            places.take(request)
            started.append(request)
        return started


def _goes_on(inner: Request, max_model_len: int) -> bool:
    """Whether launched steps do not end it by the number of tokens."""
    if not inner.num_launched_tokens:
        return True
    # With the token that the launched step samples.
    num_tokens = inner.num_computed_tokens + inner.num_launched_tokens + 1
    num_output = num_tokens - len(inner.prompt_token_ids)
    return num_output < inner.sampling.max_tokens and num_tokens < max_model_len


def _has_room(request: DecodeRequest, pool: BlockPool) -> bool:
    """Give a parked request the block for its next token; whether it has one, and may run."""
    num_needed = request.request.num_blocks_needed(1, pool.block_size)
    # The ticket allocated room for the first generated token, which the first step computes.
    assert request.is_parked or num_needed == 0
    if request.request.num_launched_tokens or not pool.can_allocate(num_needed):
        return False
    request.request.block_table += pool.allocate(num_needed)
    return True


def _commit_last_block(inner: Request, pool: BlockPool) -> None:
    """Make the block that the last step filled findable, for prompts that repeat the output."""
    num_whole, rest = divmod(inner.num_computed_tokens, pool.block_size)
    if rest == 0:
        hashes = inner.update_block_hashes(pool.block_size)
        index = num_whole - 1
        pool.commit([inner.block_table[index]], [hashes[index]])


def _release_blocks(request: DecodeRequest, pool: BlockPool) -> None:
    block_ids, request.request.block_table = request.request.block_table, []
    pool.release(block_ids)


def _check_queues(
    queues: Sequence[Sequence[DecodeRequest]], lingering: Sequence[DecodeRequest]
) -> None:
    for request in lingering:
        if request.status is not DecodeStatus.FINISHED or not request.request.block_table:
            raise InternalError("a request lingers without a reason")
    for status, queue in zip(QUEUED, queues, strict=True):
        if any(request.status is not status for request in queue):
            raise InternalError(f"a request in queue {status.value} has another status")
        if sorted(queue, key=place_of) != queue:
            raise InternalError(f"queue {status.value} is not in order")
