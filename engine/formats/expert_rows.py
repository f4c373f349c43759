"""Tokens at their experts: rows of this rank's experts, in one of three layouts.

What a dispatch returns, and `engine.formats.base.run_experts` takes. The third layout, for decode,
is `engine.kernels.masked_rows`.

Legend: D hidden size, F expert width, L local experts, M rows received by them (a token counts once
for each of its local experts), C rows before the capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from engine.formats.fp8_rows import Activation, Fp8Rows
from engine.kernels.alignment import Alignment, Overflow
from engine.kernels.masked_rows import MaskedRows
from engine.ops.op import Ops
from engine.ops.permute import PERMUTE_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """Rows in the compute dtype, in the contiguous layout: sorted by local expert.

    Attributes:
        rows_MD: [M, D], M may be 0.
        num_rows_per_expert: L counts that sum to M.
    """

    rows_MD: Tensor
    num_rows_per_expert: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedRows:
    """Rows in FP8, in the layout of `engine.kernels.alignment`.

    Attributes:
        rows: [C, D], those before the capacity.
        expert_M: [M] int32, local expert of each row, -1 for none; M is exact or an upper bound.
        overflow: the rows behind the capacity; None where C is M.
    """

    rows: Fp8Rows
    expert_M: Tensor
    overflow: Overflow | None = None

    @classmethod
    def permute(cls, ops: Ops, rows: Fp8Rows, alignment: Alignment) -> AlignedRows:
        """Copy each of `rows` to its places before the capacity; others are read as they are."""
        places = alignment.overflow
        return cls(
            rows=ops[PERMUTE_ROWS](rows, alignment),
            expert_M=alignment.expert_M,
            overflow=None if places is None else Overflow(source=rows, places=places),
        )


GroupedRows: TypeAlias = ExpertRows | AlignedRows
"""Rows in the contiguous layout: plain ones, and those of a format that quantises rows."""
Rows: TypeAlias = GroupedRows | MaskedRows
"""Rows of any layout."""


def plain(hidden: Activation) -> Tensor:
    """Return rows in the compute dtype, for whoever carries nothing else."""
    assert isinstance(hidden, Tensor)
    return hidden


def quantized(hidden: Activation) -> Fp8Rows:
    """Return FP8 rows, for whoever carries nothing else."""
    assert isinstance(hidden, Fp8Rows)
    return hidden
