"""Experts' results before they are summed: for a sum that is made where it is sent.

Legend: T tokens of this rank, P tokens of all R ranks, K experts per token, M rows of this rank's
experts, D hidden size.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRows:
    """A row for each pair of a token and an expert of this rank, and what makes sums of them.

    Attributes:
        rows_MD: [M, D], contiguous.
        places_PK: [P, K] int32, contiguous: the row of each pair; -1 where the expert is on another
            rank. Tokens are in the order of the ranks that they came from, as many from each.
        weights_PK: [P, K] float32; anything where there is no row. Possibly memory that peers write
            again when they have received the sum.
        own_ids_TK: [T, K] physical experts of this rank's own tokens, -1 for none: a rank that has
            none of a token's experts has no row for it.
        num_local_experts: of each rank.
    """

    rows_MD: Tensor
    places_PK: Tensor
    weights_PK: Tensor
    own_ids_TK: Tensor
    num_local_experts: int
