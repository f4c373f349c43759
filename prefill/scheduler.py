"""Which prompts are computed in the next step, and for which decode is asked for room. Pure.

It knows requests and counts of blocks, never tensors or threads. Two budgets bound a step:
`max_num_batched_tokens` over all requests and `max_num_seqs` requests; `prefill.fair_share` says
who gets how much of it, and `prefill.tier_shares` how tiers of service share it. A step can be
chosen while the one before it runs, because chunks depend on nothing that a step finds out.

A request holds nothing until its turn is near. Then it takes the blocks of its whole context, so
that it can never run out of them midway, and decode is asked for a ticket (CLAIMING). So decode's
memory is held for what is about to be computed, not for a queue: at most `max_num_seqs` requests
are claimed before they begin, and only those that would have a share of the tokens of the next two
steps, so that a short prompt is claimed before a long one whose turn is far. A claim that decode
has no room for waits by itself. Once it is older than `CLAIM_PATIENCE_S` it no longer counts as
what comes next, and others may pass, to other decode ranks; `2 * max_num_seqs` of them at most, so
that requests without a ticket cannot take all of our blocks.

Everything is in order of tiers, priorities and age. Requests of the tiers behind are claimed though
those before them fill the next steps, as many as their shares of a step's requests are: else a
guaranteed share would find nobody with a ticket.

Blocks are kept until every rank has stopped sending them and no launched step writes them. A
request whose turn is near waits for blocks and nobody overtakes it there: blocks that drain would
otherwise go to short prompts for ever while a long one starves.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from engine.memory.block_pool import BlockPool
from engine.request import Request, ScheduledRequest
from prefill.request import Chunk, Grant, PrefillRequest
from prefill.tier_claims import has_place, place_of
from prefill.tier_shares import StepLimits, Want, share_among_tiers
from runtime.block_hash import max_cached_blocks
from runtime.errors import InternalError, OutOfBlocksError
from runtime.metrics.step_time import StepTime
from runtime.tiers import TierTokens, first_of_tiers
from worker.lifecycle import PrefillStatus

CLAIM_PATIENCE_S = 0.1
"""Longer than any round trip: a claim that takes longer waits for room in decode."""
LOOKAHEAD_STEPS = 2
WINDOW_STEPS = 8
"""So many steps' worth of requests are looked at in the queue, whatever its length."""


class Scheduler:
    """Queues of a prefill worker: waiting, claiming, running, sending."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Start with empty queues.

        Args:
            pool: where blocks come from; used by nobody else.
            max_num_seqs: most requests of one step.
            max_num_batched_tokens: most tokens of one step.
        """
        assert max_num_seqs > 0
        assert max_num_batched_tokens > 0
        self.pool = pool
        self.steps = StepTime()
        """Of the steps that were run; whoever runs them tells it."""
        self.waiting: list[PrefillRequest] = []  # in order of places
        self.claiming: dict[int, PrefillRequest] = {}  # by nonce
        self.running: list[PrefillRequest] = []  # in order of places
        self.sending: dict[int, PrefillRequest] = {}  # by nonce
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_arrived = 0

    @property
    def num_requests(self) -> int:
        """Requests in any queue."""
        return len(self.waiting) + len(self.claiming) + len(self.running) + len(self.sending)

    @property
    def num_tokens_waiting(self) -> int:
        """Context tokens that are still to be computed."""
        return sum(tier.num_tokens for tier in self.tokens_by_tier())

    def tokens_by_tier(self) -> tuple[TierTokens, ...]:
        """The same by tier, first in order first; a tier that has none is left out."""
        counts: Counter[tuple[int, float]] = Counter()
        for item in self.unfinished():
            is_waiting = item.status is PrefillStatus.WAITING
            lacking = item.num_lacking_tokens if is_waiting else item.request.num_uncomputed_tokens
            if lacking:
                counts[item.standing.order, item.standing.share] += lacking
        return tuple(TierTokens(*tier, counts[tier]) for tier in sorted(counts))

    def unfinished(self) -> Iterator[PrefillRequest]:
        """The requests whose first token is still to come."""
        yield from self.running
        yield from self.unbegun()

    def unbegun(self) -> Iterator[PrefillRequest]:
        """The requests that decode has given no ticket."""
        yield from self.claiming.values()
        yield from self.waiting

    def add(self, item: PrefillRequest) -> None:
        """Queue a request, behind those of its standing that wait for as long.

        Raises:
            OutOfBlocksError: the whole pool is smaller than its context.
        """
        num_blocks = item.num_context_blocks(self.pool.block_size)
        if num_blocks > self.pool.num_usable_blocks:
            raise OutOfBlocksError(
                f"the context of {item.request.num_context_tokens} tokens needs {num_blocks} KV "
                f"blocks and the worker has {self.pool.num_usable_blocks}: shorten it, or raise "
                "prefill.num_blocks",
                request_id=item.request_id,
            )
        num_cached = self.pool.count_prefix(self._shareable(item.request)) * self.pool.block_size
        item.num_lacking_tokens = item.request.num_context_tokens - num_cached
        item.place = (*item.standing.place, item.arrived_at - item.waited_s, self._num_arrived)
        self._num_arrived += 1
        bisect.insort(self.waiting, item, key=place_of)

    def claim(self, now: float) -> list[PrefillRequest]:
        """Give blocks to the requests that the next steps would have tokens for, oldest first.

        Decode must be asked for their tickets, and `grant` or `drop` called for each.
        """
        ahead = [item for item in self.running if item.request.num_uncomputed_tokens]
        ahead += [
            item for item in self.claiming.values() if now < item.claimed_at + CLAIM_PATIENCE_S
        ]
        unbegun = Counter(item.standing.order for item in ahead if not item.has_begun)
        claiming = Counter(item.standing.order for item in self.claiming.values())
        claimed: list[PrefillRequest] = []
        for item in self._next_in(LOOKAHEAD_STEPS, ahead, now):
            order = item.standing.order
            if not (
                has_place(item, unbegun, self._max_num_seqs)
                and has_place(item, claiming, 2 * self._max_num_seqs)
            ):
                continue
            if not self._allocate(item):
                break
            self.waiting.remove(item)
            item.claimed_at = now
            item.move_to(PrefillStatus.CLAIMING)
            self.claiming[item.nonce] = item
            claimed.append(item)
            unbegun[order] += 1
            claiming[order] += 1
        return claimed

    def grant(self, item: PrefillRequest, grant: Grant) -> None:
        """Decode has room: the request is computed in its turn, by its place in the queue."""
        del self.claiming[item.nonce]
        item.take_grant(grant)
        item.move_to(PrefillStatus.RUNNING)
        bisect.insort(self.running, item, key=place_of)

    def schedule(self, now: float = 0.0) -> list[Chunk]:
        """Choose the next step among the requests that have a ticket.

        For each chunk `advance` must be called when the step is over, or `take_back`.

        Returns:
            At most one chunk a request, in order of places; empty if nothing can run now.
        """
        ready = [item for item in self.running if item.request.num_uncomputed_tokens]
        for item in ready:
            if not item.has_begun:
                self._share_more(item.request)
        wants = [_want_of(item, item.request.num_uncomputed_tokens) for item in ready]
        limits = StepLimits(self._max_num_batched_tokens, self._max_num_seqs)
        shares = share_among_tiers(wants, limits, self.steps, now)
        return [self._take(item, share) for item, share in zip(ready, shares, strict=True) if share]

    def advance(self, chunk: Chunk) -> None:
        """Record that the chunk was computed; its whole blocks become findable by others."""
        request, block_size = chunk.item.request, self.pool.block_size
        first, last = chunk.scheduled.start // block_size, chunk.scheduled.end // block_size
        request.num_computed_tokens = chunk.scheduled.end
        request.num_launched_tokens -= chunk.scheduled.num_scheduled_tokens
        self.pool.commit(request.block_table[first:last], request.block_hashes[first:last])

    def take_back(self, chunk: Chunk) -> None:
        """The chunk was not computed: it is still to come, as far as its request goes on."""
        chunk.item.request.num_launched_tokens -= chunk.scheduled.num_scheduled_tokens

    def drop(self, item: PrefillRequest) -> None:
        """End a request that has no ticket: no sender has heard of it."""
        if item.status is PrefillStatus.WAITING:
            self.waiting.remove(item)
        else:
            del self.claiming[item.nonce]
        item.move_to(PrefillStatus.FINISHED)
        self._release(item)

    def stop(self, item: PrefillRequest) -> None:
        """Launch no more of a running request; its blocks stay until `finish`."""
        self.running.remove(item)
        item.move_to(PrefillStatus.SENDING)
        self.sending[item.nonce] = item

    def finish(self, item: PrefillRequest) -> None:
        """Release the blocks of a request that no rank sends; the prefix cache keeps them."""
        assert item.request.num_launched_tokens == 0, "a step that was launched writes its blocks"
        del self.sending[item.nonce]
        item.move_to(PrefillStatus.FINISHED)
        self._release(item)

    def check_integrity(self) -> None:
        """Check that blocks are conserved: none is held without a request. Run when idle.

        Raises:
            InternalError: the pool's books disagree, or blocks are held by nobody.
        """
        self.pool.check_integrity()
        if self.num_requests == 0 and self.pool.num_free_blocks != self.pool.num_usable_blocks:
            lost = self.pool.num_usable_blocks - self.pool.num_free_blocks
            raise InternalError(f"{lost} KV blocks are held and no request is left")

    def _next_in(
        self, num_steps: int, ahead: Sequence[PrefillRequest], now: float
    ) -> list[PrefillRequest]:
        """The waiting requests that so many steps would have tokens for beside those ahead."""
        window = WINDOW_STEPS * self._max_num_seqs
        firsts = first_of_tiers(self.waiting, place_of, window).values()
        items = sorted(itertools.chain(ahead, *firsts), key=place_of)
        wants = [
            _want_of(
                item,
                item.num_lacking_tokens
                if item.status is PrefillStatus.WAITING
                else item.request.num_uncomputed_tokens,
            )
            for item in items
        ]
        limits = StepLimits(
            num_steps * self._max_num_batched_tokens, num_steps * self._max_num_seqs
        )
        shares = share_among_tiers(wants, limits, self.steps, now)
        return [
            item
            for item, share in zip(items, shares, strict=True)
            if share and item.status is PrefillStatus.WAITING
        ]

    def _take(self, item: PrefillRequest, num_tokens: int) -> Chunk:
        scheduled = ScheduledRequest(item.request, num_tokens)
        item.request.num_launched_tokens += num_tokens
        return Chunk(item, scheduled, self.pool.block_size)

    def _allocate(self, item: PrefillRequest) -> bool:
        """Give a request the blocks of its whole context, cached ones first; all or nothing."""
        request = item.request
        cached = self.pool.match_prefix(self._shareable(request))
        num_new = item.num_context_blocks(self.pool.block_size) - len(cached)
        if not self.pool.can_allocate(num_new):
            self.pool.release(cached)
            return False
        request.block_table.extend(cached + self.pool.allocate(num_new))
        self._set_cached(request, len(cached))
        return True

    def _share_more(self, request: Request) -> None:
        """Take what others have computed of the same prefix since the blocks were given.

        Requests that came together would otherwise all compute the prefix that they share.
        """
        hashes = self._shareable(request)
        num_held = request.num_cached_tokens // self.pool.block_size
        if self.pool.count_prefix(hashes) > num_held:
            cached = self.pool.match_prefix(hashes)
            self.pool.release(request.block_table[: len(cached)])
            request.block_table[: len(cached)] = cached
            self._set_cached(request, len(cached))

    def _shareable(self, request: Request) -> list[bytes]:
        """The hashes of the blocks that may come from the prefix cache."""
        hashes = request.update_block_hashes(self.pool.block_size)
        limit = max_cached_blocks(request.num_context_tokens, self.pool.block_size)
        if request.sampling.num_prompt_logprobs >= 0:
            limit = 0  # the logits of every position are wanted, so every position is computed
        return list(hashes[:limit])

    def _set_cached(self, request: Request, num_blocks: int) -> None:
        request.num_cached_tokens = num_blocks * self.pool.block_size
        request.num_computed_tokens = request.num_cached_tokens

    def _release(self, item: PrefillRequest) -> None:
        self.pool.release(item.request.block_table)
        item.request.block_table.clear()


def _want_of(item: PrefillRequest, num_tokens: int) -> Want:
    standing = item.standing
    return Want(standing.order, standing.share, num_tokens, item.due_at)
