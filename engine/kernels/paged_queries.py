"""Sequences of a decode step, found by their block tables: what paged attention is told.

Every sequence has one query, its last position. Nothing here is known to the host, so a step that
attends this way can be captured in a CUDA graph and replayed with other lengths.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedQueries:
    """The same object for all layers of a step.

    Attributes:
        block_tables_SB: [S, B] int32, block ids in order of positions; what lies beyond a
            sequence's length is any block of the pool, normally the dummy block 0.
        seq_lens_S: [S] int32, positions of each sequence, the query's own included; at least 1.
        schedule: how a vendor's kernel splits the sequences over the GPU, made once a step from
            `seq_lens_S` on the device; None where the kernel wants none.
    """

    block_tables_SB: Tensor
    seq_lens_S: Tensor
    schedule: tuple[Tensor, Tensor] | None = None
