"""What products in FP8 are put together from; each part has one implementation per library.

That library is known in the implementation's file alone.
"""

from typing import Protocol

from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.alignment import Overflow
from engine.kernels.masked_rows import MaskedRows


class BlockGemm(Protocol):
    """Products of rows in FP8 and block-quantised weights; see `deep_gemm.DeepGemm`."""

    def linear(self, x: Fp8Rows, weight_NK: Tensor, scale_inv_PQ: Tensor) -> Tensor:
        """Multiply with one weight: [T, N] bfloat16."""
        ...

    def grouped_linear(
        self,
        x: Fp8Rows,
        expert_M: Tensor,
        weight_ENK: Tensor,
        scale_inv_EPQ: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiply aligned rows with their expert's weight: [M, N] bfloat16, in `out` if given."""
        ...

    def masked_linear(self, x: MaskedRows, weight_LNK: Tensor, scale_inv_LPQ: Tensor) -> Tensor:
        """Multiply rows in use with their expert's weight: [L, M, N] bfloat16."""
        ...


class MaskedMlp(Protocol):
    """Experts over masked rows in one go; see `expert_stream.mlp.ExpertStream`."""

    def takes(
        self, rows: MaskedRows, w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]
    ) -> bool:
        """Return whether it is to be used for these."""
        ...

    def masked_fp8_mlp(
        self, rows: MaskedRows, w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Run each expert's MLP over its rows in use: [L, M, D] bfloat16."""
        ...


class OverflowMlp(Protocol):
    """Experts over the rows behind the capacity; see `triton_gemm.overflow.OverflowExperts`."""

    def run(
        self,
        overflow: Overflow,
        expert_V: Tensor,
        w13: tuple[Tensor, Tensor],
        w2: tuple[Tensor, Tensor],
        out_VD: Tensor,
    ) -> None:
        """Run each expert's MLP; costs next to nothing where no row is in use.

        Args:
            overflow: tokens' rows, and which of them stand where.
            expert_V: [V] int32, expert of each row, equal inside a block of 128.
            w13: [E, 2F, D] e4m3, gate over up, and its scales.
            w2: [E, D, F] e4m3, and its scales.
            out_VD: [V, D] bfloat16, contiguous, to be written; rows not in use are left as they
                are, those of no token in a block in use hold anything.
        """
        ...
