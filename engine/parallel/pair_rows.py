"""Experts' results before they are summed: for a sum that is made where it is sent.

Legend: T tokens of this rank, P tokens of all R ranks, K experts per token, M rows of this rank's
experts, D hidden size.
"""

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.alignment import Alignment
from engine.kernels.masked_rows import MaskedPlaces
from engine.kernels.widths import check_unpermute


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

    @classmethod
    def placed(
        cls,
        rows_MD: Tensor,
        places: Alignment | MaskedPlaces,
        weights_PK: Tensor,
        *,
        own_ids_TK: Tensor,
        num_local_experts: int,
    ) -> "PairRows":
        """Return rows that stand where they were laid out.

        Raises:
            InternalError: there are not as many rows as were laid out, or as many weights as pairs.
        """
        check_unpermute(rows_MD, places, weights_PK, None)
        return cls(
            rows_MD=rows_MD,
            places_PK=places.rows_TK,
            weights_PK=weights_PK,
            own_ids_TK=own_ids_TK,
            num_local_experts=num_local_experts,
        )
