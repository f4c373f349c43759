"""Suffixes cut into segments of a few queries, so that steps of any mix of them have one shape.

A segment is some of a sequence's queries, one after another, with the positions up to the last of
them: a sequence of its own to attention, over the same blocks. The key idea: with segments of a
fixed size, which is that of a tile of paged attention, the tokens of a step bound their number,
whoever the tokens belong to. Padding tokens make segments too, in the dummy block, and what is left
of the bound are segments without a query. Pure.

Legend: T tokens with padding, S sequences at most, Q queries of a segment, N segments.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

TILE_ROWS: Final = 64
"""Heads times queries that a program of paged attention holds, on Hopper."""


def queries_of_a_segment(num_heads: int) -> int:
    """Return Q for a rank of so many heads."""
    return max(1, TILE_ROWS // num_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentShape:
    """What is fixed.

    Attributes:
        num_tokens: T.
        num_seqs: S.
        num_queries: Q.
    """

    num_tokens: int
    num_seqs: int
    num_queries: int

    @property
    def num_segments(self) -> int:
        """N: enough for T tokens of S sequences and padding, of which each may end in a rest."""
        num_rests = min(self.num_seqs + 1, self.num_tokens)
        return (self.num_tokens - num_rests) // self.num_queries + num_rests

    def cut(self, lengths: Sequence[tuple[int, int]]) -> Int32Array:
        """Return [3, N + 1]: block table, first row and positions of each segment.

        Block table S is that of padding. The last column ends the rows, and means nothing else.

        Args:
            lengths: queries and positions of each sequence, of T queries at most.
        """
        table = np.zeros((3, self.num_segments + 1), dtype=np.int32)
        table[0], table[1], table[2] = self.num_seqs, self.num_tokens, 1
        num_padding = self.num_tokens - sum(queries for queries, _ in lengths)
        assert num_padding >= 0
        assert len(lengths) <= self.num_seqs
        row = column = 0
        owners = [*enumerate(lengths), (self.num_seqs, (num_padding, 0))]
        for owner, (queries, positions) in owners:
            for count in self._counts(queries):
                queries -= count
                # Padding begins anew with every segment.
                seen = positions - queries if positions else count
                table[:, column] = owner, row, seen
                row, column = row + count, column + 1
        return table

    def _counts(self, queries: int) -> Iterator[int]:
        while queries > 0:
            yield min(queries, self.num_queries)
            queries -= self.num_queries
