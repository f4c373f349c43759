"""Requests that gave their blocks up: where their KV is, and its way there and back.

A request that is preempted is OFFLOADING while its blocks are copied to host memory, which holds
them until then, and PREEMPTED afterwards. Who is preempted and who returns is the scheduler's
decision. Pure but for the store; used by the engine loop's thread only.
"""

from __future__ import annotations

from bisect import insort

from decode.offload import HostStore
from decode.requests import DecodeRequest, place_of
from engine.memory.block_pool import BlockPool
from engine.request import num_blocks_for
from runtime.errors import InternalError
from worker.lifecycle import DecodeStatus


class PreemptedRequests:
    """All of one rank, in order of their places."""

    def __init__(self, pool: BlockPool, host: HostStore) -> None:
        self._pool = pool
        self._host = host
        self.offloading: list[DecodeRequest] = []
        self.preempted: list[DecodeRequest] = []

    @property
    def num_blocks(self) -> int:
        """Blocks in host memory, or on their way there."""
        return self._host.num_blocks

    def can_take(self, request: DecodeRequest) -> bool:
        """Whether host memory has room for its KV."""
        return self._host.can_hold(self._num_valid_blocks(request))

    def take(self, request: DecodeRequest) -> None:
        """Begin to copy the KV of a running request that no launched step runs."""
        assert not request.request.num_launched_tokens, "a launched step writes its blocks"
        valid = request.request.block_table[: self._num_valid_blocks(request)]
        self._host.save(request.request_id, valid)
        request.move_to(DecodeStatus.OFFLOADING)
        insort(self.offloading, request, key=place_of)

    def settle(self) -> None:
        """Give back the blocks of those whose KV has reached host memory."""
        for request in [item for item in self.offloading if self._host.is_saved(item.request_id)]:
            self.offloading.remove(request)
            block_ids, request.request.block_table = request.request.block_table, []
            self._pool.release(block_ids)
            request.move_to(DecodeStatus.PREEMPTED)
            insort(self.preempted, request, key=place_of)

    def restore(self, request: DecodeRequest, num_blocks: int) -> None:
        """Make a preempted request RUNNING again, with `num_blocks` blocks, which must be free."""
        self.preempted.remove(request)
        inner = request.request
        inner.block_table = self._pool.allocate(num_blocks)
        self._host.restore(request.request_id, inner.block_table[: self._num_valid_blocks(request)])
        num_whole = inner.num_computed_tokens // self._pool.block_size
        hashes = inner.update_block_hashes(self._pool.block_size)
        self._pool.commit(inner.block_table[:num_whole], hashes[:num_whole])
        request.move_to(DecodeStatus.RUNNING)

    def drop(self, request: DecodeRequest) -> None:
        """Forget the KV of a request that ends."""
        self._host.drop(request.request_id)

    def check_integrity(self) -> None:
        """Raise InternalError if host memory holds other KV than that of these requests."""
        self._host.check_integrity()
        num_blocks = sum(map(self._num_valid_blocks, [*self.offloading, *self.preempted]))
        if num_blocks != self._host.num_blocks:
            raise InternalError(
                f"host memory holds {self._host.num_blocks} blocks, preempted requests {num_blocks}"
            )

    def _num_valid_blocks(self, request: DecodeRequest) -> int:
        return num_blocks_for(request.request.num_computed_tokens, self._pool.block_size)
