"""Host memory for the KV of preempted requests.

Preempting a request starts a copy of its blocks to here, which may take some steps; once it is done
the blocks are given back. Resuming copies into other blocks. The copy is exact, so a request that
was preempted goes on with the same tokens. The store is bounded: what does not fit cannot be
preempted. Keyed by request id; knows block counts and opaque copies, nothing of requests. Used by
the engine loop's thread, which it never makes wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from runtime.errors import InternalError

CopyT = TypeVar("CopyT")


class BlockCopier(Protocol[CopyT]):
    """What the store needs: `KVPool` has it for a CPU, `PinnedBlocks` for a GPU (engine.memory)."""

    def copy_out(self, block_ids: Sequence[int]) -> CopyT:
        """Start a host copy of the blocks."""

    def is_done(self, blocks: CopyT) -> bool:
        """Whether the blocks have been read: they may be reused."""

    def copy_in(self, block_ids: Sequence[int], blocks: CopyT) -> None:
        """Write such a copy into blocks, in the same order, before the next step reads them."""

    def discard(self, blocks: CopyT) -> None:
        """The copy is not needed any more."""


class HostStore(Protocol):
    """What the scheduler needs of an offload store."""

    @property
    def num_blocks(self) -> int:
        """Blocks that are held now."""
        ...

    def can_hold(self, num_blocks: int) -> bool:
        """Whether so many more blocks fit."""

    def save(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Start to copy the blocks out; they may be reused once it `is_saved`."""

    def is_saved(self, request_id: str) -> bool:
        """Whether the copy is complete."""

    def restore(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Copy what was saved into other blocks and forget it."""

    def drop(self, request_id: str) -> None:
        """Forget what was saved."""

    def check_integrity(self) -> None:
        """Raise InternalError if the books disagree."""


class HostBlockStore(Generic[CopyT]):
    """Copies of at most `max_blocks` blocks."""

    def __init__(self, kv: BlockCopier[CopyT], max_blocks: int) -> None:
        self._kv = kv
        self._max_blocks = max_blocks
        self._copies: dict[str, tuple[int, CopyT]] = {}
        self._num_blocks = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that are held now."""
        return self._num_blocks

    def can_hold(self, num_blocks: int) -> bool:
        """Whether `num_blocks` more fit."""
        return self._num_blocks + num_blocks <= self._max_blocks

    def save(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Start to copy the blocks out; they may be reused once it `is_saved`.

        Raises:
            InternalError: the request is saved already, or the blocks do not fit.
        """
        if request_id in self._copies:
            raise InternalError("its KV is offloaded already", request_id=request_id)
        if not self.can_hold(len(block_ids)):
            raise InternalError(
                f"{len(block_ids)} blocks do not fit into host memory: "
                f"{self._num_blocks} of {self._max_blocks} are in use",
                request_id=request_id,
            )
        self._copies[request_id] = (len(block_ids), self._kv.copy_out(block_ids))
        self._num_blocks += len(block_ids)

    def is_saved(self, request_id: str) -> bool:
        """Whether the copy is complete."""
        _, copy = self._copies[request_id]
        return self._kv.is_done(copy)

    def restore(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Copy what was saved into `block_ids`, as many and in the same order, and forget it."""
        num_blocks, copy = self._copies.pop(request_id)
        self._num_blocks -= num_blocks
        if num_blocks != len(block_ids):
            raise InternalError(
                f"{num_blocks} blocks were offloaded, {len(block_ids)} are to be restored",
                request_id=request_id,
            )
        self._kv.copy_in(block_ids, copy)
        self._kv.discard(copy)

    def drop(self, request_id: str) -> None:
        """Forget what was saved for the request."""
        num_blocks, copy = self._copies.pop(request_id)
        self._num_blocks -= num_blocks
        self._kv.discard(copy)

    def check_integrity(self) -> None:
        """Raise InternalError unless the count is that of the copies."""
        if self._num_blocks != sum(num_blocks for num_blocks, _ in self._copies.values()):
            raise InternalError("the offload store's count of blocks disagrees with its copies")
