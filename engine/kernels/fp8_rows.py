"""Activations in FP8: rows of e4m3 numbers with one float32 scale per 128 neighbours.

The counterpart of the weights' 128 x 128 blocks (`engine.weights.fp8`), in the layout that matrix
products on Hopper read: scales lie column after column, each column padded to 16 bytes, so that a
tile's scales are one run. This module knows the layout and nothing about who fills it.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

GROUP: Final = 128
"""Neighbours that share a scale."""

MIN_AMAX: Final = 1e-10
"""A group of zeros is scaled by this instead, so that no scale is zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Rows:
    """T rows of K numbers.

    Attributes:
        data_TK: [T, K] float8_e4m3fn, contiguous.
        scale_TG: [T, K / 128] float32 with stride (1, T rounded up to 4): row = data * scale.
    """

    data_TK: Tensor
    scale_TG: Tensor

    @classmethod
    def empty(cls, num_rows: int, num_columns: int, device: torch.device) -> "Fp8Rows":
        """Return uninitialised rows; `num_columns` is a multiple of 128."""
        assert num_columns % GROUP == 0, num_columns
        padded = -(-num_rows // 4) * 4
        scales = torch.empty((num_columns // GROUP, padded), dtype=torch.float32, device=device)
        return cls(
            data_TK=torch.empty((num_rows, num_columns), dtype=torch.float8_e4m3fn, device=device),
            scale_TG=scales.t()[:num_rows],
        )

    @property
    def num_rows(self) -> int:
        """T."""
        return self.data_TK.shape[0]

    def dequantize(self) -> Tensor:
        """Return [T, K] float32."""
        groups = self.data_TK.float().view(self.num_rows, self.scale_TG.shape[1], GROUP)
        return (groups * self.scale_TG.unsqueeze(-1)).flatten(1)


Activation: TypeAlias = Tensor | Fp8Rows
"""What a linear layer may be given."""
