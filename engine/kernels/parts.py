"""What a set of kernels is put together from: products in FP8, experts, and attention.

Each has one implementation per library, in a file that alone knows it; the sets of kernels know
these interfaces.
"""

from typing import Protocol

from torch import Tensor

from engine.attention.paged_queries import PagedQueries
from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.alignment import Overflow
from engine.kernels.base import VarlenLengths
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


class VarlenAttention(Protocol):
    """Attention of decompressed heads; see `flash_attention.FlashAttention`."""

    def takes(self, q_THA: Tensor, v_PHV: Tensor) -> bool:
        """Return whether it attends with heads of these widths, in this number format."""
        ...

    def describe(self, q_THA: Tensor, v_PHV: Tensor) -> str:
        """Return what attends with such heads, for the log."""
        ...

    def varlen_attention(
        self, q_THA: Tensor, k_PHA: Tensor, v_PHV: Tensor, seqs: VarlenLengths, scale: float
    ) -> Tensor:
        """Attend in several sequences: [T, H, V]."""
        ...

    def varlen_attention_part(
        self,
        q_THA: Tensor,
        k_PHA: Tensor,
        v_PHV: Tensor,
        seqs: VarlenLengths,
        scale: float,
        *,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """Attend to a part of the positions: [T, H, V] contiguous, and [H, T] float32."""
        ...


class PageAttention(Protocol):
    """Absorbed attention by block tables; see `paged_mla.attention.PagedMLA`."""

    def why_not(self, cache: Tensor, kv_lora_rank: int) -> str:
        """Return why layers like `cache` are not taken, or nothing."""
        ...

    def plan(self, queries: PagedQueries, cache: Tensor, num_heads: int) -> PagedQueries:
        """See `Kernels.plan_paged`."""
        ...

    def paged_attention(
        self, q_THL: Tensor, cache: Tensor, queries: PagedQueries, kv_lora_rank: int, scale: float
    ) -> Tensor:
        """Attend: [T, H, C]."""
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
