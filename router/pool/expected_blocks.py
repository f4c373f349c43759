"""Blocks that ranks are going to hold: of prompts that were sent there a moment ago.

Several prompts on their way to one rank may have a block in common, so it is expected for as long
as any of them is. Ranks are bits here, as in the index.
"""

from __future__ import annotations

from collections.abc import Iterable


class ExpectedBlocks:
    """Sets of ranks by block, and how many prompts say so where there are several."""

    __slots__ = ("_further", "_ranks_of")

    def __init__(self) -> None:
        self._ranks_of: dict[bytes, int] = {}
        self._further: dict[tuple[bytes, int], int] = {}
        """By block and rank: prompts beyond the first."""

    def __len__(self) -> int:
        """Blocks that any rank is going to hold."""
        return len(self._ranks_of)

    def ranks_of(self, block_hash: bytes) -> int:
        """Those that are going to hold a block."""
        return self._ranks_of.get(block_hash, 0)

    def add(self, bit: int, block_hashes: Iterable[bytes]) -> None:
        """One more prompt is on its way to this rank."""
        ranks_of, further = self._ranks_of, self._further
        for block_hash in block_hashes:
            ranks = ranks_of.get(block_hash, 0)
            if ranks & bit:
                counted = block_hash, bit
                further[counted] = further.get(counted, 0) + 1
            else:
                ranks_of[block_hash] = ranks | bit

    def remove(self, bit: int, block_hashes: Iterable[bytes]) -> None:
        """One of those that were added is computed, or will not be."""
        ranks_of, further = self._ranks_of, self._further
        for block_hash in block_hashes:
            counted = block_hash, bit
            number = further.get(counted, 0) if further else 0
            if number > 1:
                further[counted] = number - 1
            elif number:
                del further[counted]
            elif left := ranks_of[block_hash] & ~bit:
                ranks_of[block_hash] = left
            else:
                del ranks_of[block_hash]
