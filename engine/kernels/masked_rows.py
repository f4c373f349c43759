"""The masked layout of grouped GEMMs: a fixed number of rows per expert, the first ones in use.

For decode: shapes follow from the size of the batch, how many rows an expert has is known to the
device alone, and so a whole step can be captured in a CUDA graph. Not the layout of prefill, which
is `engine.kernels.alignment`: room for every token at every expert would be too much there.

Letters: L experts of this rank, M rows of each, T tokens, K experts per token, D and G = D / 128
columns of data and scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.formats.fp8_rows import GROUP
from engine.invariants import require

MASKED_BLOCK: Final = 128
"""M is a multiple: GEMMs write whole tiles of rows, which must not reach the next expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedPlaces:
    """Where each (token, expert) pair stands.

    Attributes:
        rows_TK: [T, K] int32, row of each pair among all L * M rows; -1 where the expert is on
            another rank.
        num_rows_L: [L] int32 on the device, rows in use of each expert.
        max_rows: M.
        expected_rows: see `MaskedRows`.
    """

    rows_TK: Tensor
    num_rows_L: Tensor
    max_rows: int
    expected_rows: int

    @property
    def num_rows(self) -> int:
        """L * M."""
        return self.num_rows_L.shape[0] * self.max_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedRows:
    """Tokens at their experts in FP8.

    Attributes:
        data_LMD: [L, M, D] float8_e4m3fn, contiguous; rows of expert l from num_rows_L[l] on hold
            anything.
        scale_LMG: [L, M, G] float32 with stride (G * M, 1, M).
        num_rows_L: [L] int32 on the device.
        expected_rows: mean of num_rows_L as the host guesses it, at least 1. Kernels choose their
            tiles by it; it changes no result.
    """

    data_LMD: Tensor
    scale_LMG: Tensor
    num_rows_L: Tensor
    expected_rows: int


@dataclass(frozen=True, slots=True)
class MaskedRoom:
    """Sizes of `MaskedRows` in a step.

    Attributes:
        max_rows: M, of each expert.
        expected_rows: what the host guesses that an expert gets.
    """

    max_rows: int
    expected_rows: int


def empty_masked(
    num_experts: int, max_rows: int, num_columns: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return uninitialised data and scales as `MaskedRows` has them."""
    require(
        max_rows % 4 == num_columns % GROUP == 0,
        "rows and columns",
        (max_rows, num_columns),
        f"multiples of 4 and of {GROUP} are wanted",
    )
    data = torch.empty(
        (num_experts, max_rows, num_columns), dtype=torch.float8_e4m3fn, device=device
    )
    scale = torch.empty(
        (num_experts, num_columns // GROUP, max_rows), dtype=torch.float32, device=device
    )
    return data, scale.transpose(1, 2)


def require_room(num_tokens: int, max_rows: int) -> None:
    """Check that each expert has room for every token.

    Raises:
        InternalError: it has not.
    """
    require(num_tokens <= max_rows, "tokens", num_tokens, f"there is room for {max_rows}")


def max_masked_rows(num_tokens: int) -> int:
    """Return the least M that any routing of `num_tokens` fits: a token is once at an expert."""
    return max(1, -(-num_tokens // MASKED_BLOCK)) * MASKED_BLOCK


def guess_rows(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Return the mean rows of an expert if `num_tokens` choose `top_k` of `num_experts` evenly."""
    return max(1, -(-num_tokens * top_k // num_experts))
