"""A weight as its number format keeps it."""

from typing import NamedTuple

from torch import Tensor


class StoredWeight(NamedTuple):
    """One matrix, or a stack of them.

    Attributes:
        numbers: [..., N, K].
        scale: as the format lays scales out, float32; None for numbers that need none.
    """

    numbers: Tensor
    scale: Tensor | None = None

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return numbers and scales of a weight that has scales."""
        assert self.scale is not None
        return self.numbers, self.scale
