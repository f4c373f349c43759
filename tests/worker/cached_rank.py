"""A rank whose prefix cache is followed: a real block pool, steps by hand."""

from __future__ import annotations

from collections.abc import Callable

from engine.memory.block_pool import BlockPool
from worker.cache_log import CacheFeed


def block_hash(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Rank:
    """A block pool whose owner runs what is posted at its next step."""

    def __init__(self, num_blocks: int = 9, linger_s: float = 30.0) -> None:
        self.pool = BlockPool(num_blocks, 4)
        self.posted: list[Callable[[], None]] = []
        self.feed = CacheFeed(self.pool, self.posted.append, linger_s=linger_s)

    def step(self) -> None:
        for work in self.posted:
            work()
        self.posted.clear()
        self.feed.tell()

    def compute(self, *numbers: int) -> None:
        """Store blocks and let go of them."""
        blocks = self.pool.allocate(len(numbers))
        self.pool.commit(blocks, [block_hash(number) for number in numbers])
        self.pool.release(blocks)
