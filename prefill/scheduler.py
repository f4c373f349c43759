"""Which prompts are computed in the next step: chunked prefill, first come first served. Pure.

It knows requests and counts of blocks, never tensors or threads. Two budgets bound a step:
`max_num_batched_tokens` over all requests and `max_num_seqs` requests. A request takes the blocks
of its whole prompt when it starts, so it can never run out of them midway; it keeps them until
every rank has stopped sending them and no launched step writes them. A step can be chosen while the
one before it runs, because chunks depend on nothing that a step finds out. The head of the queue
waits for blocks and nobody overtakes it: blocks that drain would otherwise go to short prompts for
ever while a long one starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine.memory.block_pool import BlockPool
from engine.request import ScheduledRequest
from prefill.request import Chunk, PrefillRequest
from runtime.block_hash import max_cached_blocks
from runtime.errors import InternalError, OutOfBlocksError
from runtime.lifecycle import PrefillStatus


class Scheduler:
    """Queues of a prefill worker: waiting, running, sending."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Start with empty queues.

        Args:
            pool: where blocks come from; used by nobody else.
            max_num_seqs: most requests that run at once.
            max_num_batched_tokens: most prompt tokens of one step.
        """
        assert max_num_seqs > 0
        assert max_num_batched_tokens > 0
        self.pool = pool
        self.waiting: deque[PrefillRequest] = deque()
        self.running: list[PrefillRequest] = []
        self.sending: dict[int, PrefillRequest] = {}  # by nonce
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    @property
    def num_requests(self) -> int:
        """Requests in any queue."""
        return len(self.waiting) + len(self.running) + len(self.sending)

    @property
    def num_tokens_waiting(self) -> int:
        """Prompt tokens that are still to be computed."""
        return sum(item.request.num_uncomputed_tokens for item in self.unfinished())

    def unfinished(self) -> Iterator[PrefillRequest]:
        """The requests whose first token is still to come."""
        yield from self.running
        yield from self.waiting

    def add(self, item: PrefillRequest) -> None:
        """Queue a request.

        Raises:
            OutOfBlocksError: the whole pool is smaller than its prompt.
        """
        num_blocks = item.num_prompt_blocks(self.pool.block_size)
        if num_blocks > self.pool.num_usable_blocks:
            raise OutOfBlocksError(
                f"the prompt of {item.request.num_prompt_tokens} tokens needs {num_blocks} KV "
                f"blocks and the worker has {self.pool.num_usable_blocks}: shorten it, or raise "
                "prefill.num_blocks",
                request_id=item.request_id,
            )
        self.waiting.append(item)

    def schedule(self) -> list[Chunk]:
        """Choose the next step, oldest requests first; starts waiting ones while budgets last.

        The step must be launched, and `advance` called for each chunk when it is over.

        Returns:
            At most one chunk a request; empty if nothing can run now.
        """
        budget = self._max_num_batched_tokens
        chunks: list[Chunk] = []
        for item in self.running:
            budget -= self._take(item, budget, chunks)
        while budget and self.waiting and len(chunks) < self._max_num_seqs:
            item = self.waiting[0]
            if not self._allocate(item):
                break
            self.waiting.popleft()
            item.move_to(PrefillStatus.RUNNING)
            self.running.append(item)
            budget -= self._take(item, budget, chunks)
        return chunks

    def advance(self, chunk: Chunk) -> None:
        """Record that the chunk was computed; its whole blocks become findable by others."""
        request, block_size = chunk.item.request, self.pool.block_size
        first, last = chunk.scheduled.start // block_size, chunk.scheduled.end // block_size
        request.num_computed_tokens = chunk.scheduled.end
        request.num_launched_tokens -= chunk.scheduled.num_scheduled_tokens
        self.pool.commit(request.block_table[first:last], request.block_hashes[first:last])

    def drop(self, item: PrefillRequest) -> None:
        """End a request that waits; it holds nothing."""
        self.waiting.remove(item)
        item.move_to(PrefillStatus.FINISHED)

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
        self.pool.release(item.request.block_table)
        item.request.block_table.clear()

    def check_integrity(self) -> None:
        """Check that blocks are conserved: none is held without a request. Run when idle.

        Raises:
            InternalError: the pool's books disagree, or blocks are held by nobody.
        """
        self.pool.check_integrity()
        if self.num_requests == 0 and self.pool.num_free_blocks != self.pool.num_usable_blocks:
            lost = self.pool.num_usable_blocks - self.pool.num_free_blocks
            raise InternalError(f"{lost} KV blocks are held and no request is left")

    def _take(self, item: PrefillRequest, budget: int, chunks: list[Chunk]) -> int:
        num_tokens = min(budget, item.request.num_uncomputed_tokens)
        if num_tokens > 0:
            scheduled = ScheduledRequest(item.request, num_tokens)
            chunks.append(Chunk(item, scheduled, self.pool.block_size))
            item.request.num_launched_tokens += num_tokens
        return num_tokens

    def _allocate(self, item: PrefillRequest) -> bool:
        """Give a request the blocks of its whole prompt, cached ones first; all or nothing."""
        request = item.request
        hashes = request.update_block_hashes(self.pool.block_size)
        limit = max_cached_blocks(request.num_prompt_tokens, self.pool.block_size)
        if request.sampling.num_prompt_logprobs >= 0:
            limit = 0  # the logits of every position are wanted, so every position is computed
        cached = self.pool.match_prefix(hashes[:limit])
        num_new = item.num_prompt_blocks(self.pool.block_size) - len(cached)
        if not self.pool.can_allocate(num_new):
            self.pool.release(cached)
            return False
        request.block_table.extend(cached + self.pool.allocate(num_new))
        request.num_cached_tokens = len(cached) * self.pool.block_size
        request.num_computed_tokens = request.num_cached_tokens
        return True
