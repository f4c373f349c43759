"""A matrix of a rank's experts as grouped GEMMs take it: stacked, in one of two number formats."""

from typing import Protocol

from torch import Tensor


class ExpertMatrix(Protocol):
    """[L, N, K], one matrix per local expert."""

    @property
    def weight(self) -> Tensor:
        """In the compute dtype, or e4m3."""
        ...

    def quantized_pair(self) -> tuple[Tensor, Tensor]:
        """Return (e4m3, scales) of a matrix in FP8."""
        ...
