"""KV blocks of a GPU's pool in pinned host memory, copied beside the steps.

Called on the engine loop's thread; copies run on a stream of their own, in order, behind what was
launched before. `copy_out` and `copy_in` only issue copies, one for each run of adjacent blocks,
and wait for nothing: a block of all layers is one contiguous piece, so nothing is gathered and the
GPU needs no second copy. The pinned memory is allocated once, at boot, and belongs to this object;
a copy holds its places in it until `discard`. Places may be given out again while an older copy of
them is still under way, because all copies run in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.memory.kv_pool import KVPool
from engine.streams import Streams, StreamUse
from runtime.errors import InternalError


@dataclass(frozen=True, slots=True)
class PinnedCopy:
    """Where blocks lie in pinned memory, in order, and the event behind the last copy."""

    places: tuple[int, ...]
    done: torch.cuda.Event


class PinnedBlocks:
    """Room for `num_blocks` blocks of one pool."""

    def __init__(self, pool: KVPool, num_blocks: int, streams: Streams) -> None:
        """Allocate: num_blocks * pool.block_bytes of pinned memory.

        Args:
            pool: on a CUDA device.
            num_blocks: most that are held.
            streams: of the same device.
        """
        self._blocks = pool.data.view(torch.uint8).view(pool.num_blocks, pool.block_bytes)
        self._host = torch.empty(
            (num_blocks, pool.block_bytes), dtype=torch.uint8, pin_memory=num_blocks > 0
        )
        self._free = list(range(num_blocks - 1, -1, -1))
        self._device = pool.device
        self._stream = streams.of(StreamUse.KV_COPIES)

    def copy_out(self, block_ids: Sequence[int]) -> PinnedCopy:
        """Start copying blocks to the host; they may be written again once `is_done`.

        Raises:
            InternalError: there is no room.
        """
        if len(block_ids) > len(self._free):
            raise InternalError(f"{len(block_ids)} blocks, {len(self._free)} pinned places free")
        places = tuple(self._free.pop() for _ in block_ids)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for block, place, length in adjacent_runs(block_ids, places):
                self._host[place : place + length].copy_(
                    self._blocks[block : block + length], non_blocking=True
                )
        return PinnedCopy(places, self._stream.record_event())

    def copy_in(self, block_ids: Sequence[int], blocks: PinnedCopy) -> None:
        """Copy back, before all that is launched from now on; nobody waits on the host."""
        assert len(block_ids) == len(blocks.places)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for block, place, length in adjacent_runs(block_ids, blocks.places):
                self._blocks[block : block + length].copy_(
                    self._host[place : place + length], non_blocking=True
                )
        current.wait_stream(self._stream)

    def is_done(self, blocks: PinnedCopy) -> bool:
        """Whether `copy_out` has read all that it copies."""
        return bool(blocks.done.query())  # type: ignore[no-untyped-call]

    def discard(self, blocks: PinnedCopy) -> None:
        """Give the places back."""
        self._free.extend(blocks.places)


def adjacent_runs(
    block_ids: Sequence[int], places: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield (block, place, length) of runs in which both go up by one."""
    start = 0
    for index in range(1, len(block_ids) + 1):
        goes_on = index < len(block_ids) and (
            block_ids[index] - block_ids[start] == places[index] - places[start] == index - start
        )
        if not goes_on:
            yield block_ids[start], places[start], index - start
            start = index
