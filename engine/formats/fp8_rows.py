"""Activations in FP8: rows of e4m3 numbers with one float32 scale per 128 neighbours.

The counterpart of the weights' 128 x 128 blocks (`engine.weights.fp8`). Two layouts matter. Matrix
products on Hopper read scales column after column, each column padded to 16 bytes, so that a tile's
scales are one run: that is how rows are made unless told otherwise. Rows that travel are packed:
each row's scales follow its numbers, so that one copy moves both. This module knows the layouts and
nothing about who fills them.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from engine.invariants import require

GROUP: Final = 128
"""Neighbours that share a scale."""

MIN_AMAX: Final = 1e-10
"""A group of zeros is scaled by this instead, so that no scale is zero."""


def packed_row_bytes(num_columns: int) -> int:
    """Return the bytes of a packed row: numbers, scales, and padding to 16."""
    return -(-(num_columns + num_columns // GROUP * 4) // 16) * 16


def _require_groups(num_columns: int) -> None:
    require(num_columns % GROUP == 0, "columns", num_columns, f"a multiple of {GROUP} is wanted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Rows:
    """T rows of K numbers.

    Attributes:
        data_TK: [T, K] float8_e4m3fn, unit stride along K, row stride a multiple of 16.
        scale_TG: [T, K / 128] float32, any strides: row = data * scale.
    """

    data_TK: Tensor
    scale_TG: Tensor

    @classmethod
    def empty(cls, num_rows: int, num_columns: int, device: torch.device) -> "Fp8Rows":
        """Return uninitialised rows; `num_columns` is a multiple of 128."""
        _require_groups(num_columns)
        padded = -(-num_rows // 4) * 4
        scales = torch.empty((num_columns // GROUP, padded), dtype=torch.float32, device=device)
        scale_TG = scales.t()
        return cls(
            data_TK=torch.empty((num_rows, num_columns), dtype=torch.float8_e4m3fn, device=device),
            scale_TG=scale_TG if num_rows == padded else scale_TG[:num_rows],
        )

    @classmethod
    def packed(cls, buffer_TB: Tensor, num_columns: int) -> "Fp8Rows":
        """Return views into a packed buffer.

        Args:
            buffer_TB: [T, packed_row_bytes(num_columns)] uint8, unit stride along B.
            num_columns: K, a multiple of 128.
        """
        _require_groups(num_columns)
        wanted = packed_row_bytes(num_columns)
        require(
            buffer_TB.shape[1] == wanted,
            "packed rows",
            tuple(buffer_TB.shape),
            f"rows of {wanted} bytes are wanted",
        )
        end = num_columns + num_columns // GROUP * 4
        return cls(
            data_TK=buffer_TB[:, :num_columns].view(torch.float8_e4m3fn),
            scale_TG=buffer_TB[:, num_columns:end].view(torch.float32),
        )

    def column_major(self) -> "Fp8Rows":
        """Return the same rows with scales as matrix products read them (copied if need be)."""
        padded = -(-self.num_rows // 4) * 4
        if not self.num_rows or self.scale_TG.stride() == (1, padded):
            return self
        num_groups = self.scale_TG.shape[1]
        scales = torch.empty((num_groups, padded), dtype=torch.float32, device=self.scale_TG.device)
        scale_TG = scales.t()[: self.num_rows]
        scale_TG.copy_(self.scale_TG)
        return Fp8Rows(data_TK=self.data_TK, scale_TG=scale_TG)

    @property
    def num_rows(self) -> int:
        """T."""
        return self.data_TK.shape[0]

    def dequantize(self) -> Tensor:
        """Return [T, K] float32."""
        groups = self.data_TK.float().reshape(self.num_rows, self.scale_TG.shape[1], GROUP)
        return (groups * self.scale_TG.unsqueeze(-1)).flatten(1)


Activation: TypeAlias = Tensor | Fp8Rows
"""What a linear layer may be given."""


def empty_packed(num_rows: int, num_columns: int, device: torch.device) -> Fp8Rows:
    """Return uninitialised packed rows."""
    shape = (num_rows, packed_row_bytes(num_columns))
    return Fp8Rows.packed(torch.empty(shape, dtype=torch.uint8, device=device), num_columns)


def packed_bytes(rows: Fp8Rows) -> Tensor:
    """Return [T, packed_row_bytes(K)] uint8: the rows' own memory if they are packed, or a copy."""
    num_rows, num_columns = rows.data_TK.shape
    data_TK = rows.data_TK
    if not _are_packed(rows):
        packed = empty_packed(num_rows, num_columns, data_TK.device)
        packed.data_TK.copy_(data_TK)
        packed.scale_TG.copy_(rows.scale_TG)
        data_TK = packed.data_TK
    width = packed_row_bytes(num_columns)
    return data_TK.view(torch.uint8).as_strided((num_rows, width), (width, 1))


def _are_packed(rows: Fp8Rows) -> bool:
    num_columns = rows.data_TK.shape[1]
    width = packed_row_bytes(num_columns)
    return (
        rows.data_TK.stride() == (width, 1)
        and rows.scale_TG.stride() == (width // 4, 1)
        and rows.scale_TG.data_ptr() == rows.data_TK.data_ptr() + num_columns
    )
