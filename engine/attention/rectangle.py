"""Queries of sequences as a rectangle, for a kernel that wants equally many of each.

What a sequence lacks comes before its own queries, so that these stay the last positions: rows of
anybody, whose results nobody reads. Made once a step on the device, without a host read, so that a
graph can hold it.

Legend: T queries of all sequences, S sequences, Q queries of each, H heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """Where rows go, and where they are found again.

    Attributes:
        rows: [S * Q] int64, of T, which one stands in each place.
        places: [T] int64, of S * Q, where each row stands.
    """

    rows: Tensor
    places: Tensor

    @classmethod
    def of(cls, cu_seqlens_q: Tensor, width: int, num_tokens: int) -> "Rectangle":
        """Lay rows out.

        Args:
            cu_seqlens_q: [S + 1] int32, running sum of the queries; at most `width` each.
            width: Q.
            num_tokens: T, at least 1.
        """
        ends, device = cu_seqlens_q[1:].long(), cu_seqlens_q.device
        columns = torch.arange(width, device=device)
        rows_SQ = (ends.unsqueeze(1) - width + columns).clamp(min=0)
        row_T = torch.arange(num_tokens, device=device)
        seq_T = torch.bucketize(row_T, ends, right=True)
        from_end_T = ends.index_select(0, seq_T) - row_T
        return cls(rows=rows_SQ.flatten(), places=(seq_T + 1) * width - from_end_T)

    def spread(self, q_THL: Tensor) -> Tensor:
        """Return [S * Q, H, L]."""
        return q_THL.index_select(0, self.rows)

    def collect(self, out_RHC: Tensor) -> Tensor:
        """Return [T, H, C] of [S * Q, H, C]."""
        return out_RHC.index_select(0, self.places)
