"""What a set of kernels is put together from: attention.

Each has one implementation per library, in a file that alone knows it; the sets of kernels know
these interfaces.
"""

from typing import Protocol

from torch import Tensor

from engine.attention.paged_queries import PagedQueries
from engine.kernels.base import VarlenLengths


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
