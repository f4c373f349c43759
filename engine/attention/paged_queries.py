"""Sequences that are found by their block tables: what paged attention is told.

In a decode step every sequence has one query, its last position, and nothing here is known to the
host: such a step can be captured in a CUDA graph and replayed with other lengths. With more
queries they are the last positions of their sequence, each of which sees those up to its own.

Legend: S sequences, B blocks of a table, P parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.attention.rectangle import Rectangle


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryCounts:
    """How many queries sequences have, where that is not one each.

    Attributes:
        cu_seqlens_q: [S + 1] int32 on the device, running sum of the queries.
        most: queries of a sequence.
        lengths: queries and positions of each sequence; empty if the host does not know them.
        total: queries of all sequences, T; 0 if nobody says.
    """

    cu_seqlens_q: Tensor
    most: int
    lengths: Sequence[tuple[int, int]] = ()
    total: int = 0

    @property
    def are_equal(self) -> bool:
        """Whether the host knows that every sequence has `most` queries."""
        return bool(self.lengths) and all(queries == self.most for queries, _ in self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedParts:
    """How our kernel deals sequences out to programs; see `paged_mla.parts`.

    Attributes:
        table: [P, 8] int32, what each part does, on the device.
        may_cut: whether a sequence may be in two parts, so that its pieces have to be merged.
    """

    table: Tensor
    may_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedQueries:
    """The same object for all layers of a step.

    Attributes:
        block_tables_SB: [S, B] int32, block ids in order of positions; what lies beyond a
            sequence's length is any block of the pool, normally the dummy block 0.
        seq_lens_S: [S] int32, positions of each sequence, its queries' own included. A sequence
            of length 0 attends to nothing: zeros.
        counts: of the queries; None if there is one each.
        schedule: how FlashMLA splits the sequences over the GPU, made once a step from
            `seq_lens_S` on the device; None where it does not attend.
        parts: the same for our kernel; None where it does not attend.
        rectangle: how FlashMLA is given sequences with fewer queries than others; None where all
            have as many.
    """

    block_tables_SB: Tensor
    seq_lens_S: Tensor
    counts: QueryCounts | None = None
    schedule: tuple[Tensor, Tensor] | None = None
    parts: PagedParts | None = None
    rectangle: Rectangle | None = None

    @property
    def most(self) -> int:
        """Queries of a sequence, at most."""
        return 1 if self.counts is None else self.counts.most
