"""What an attention backend asks of a device: decompressed heads, latents, and pages of them.

`AttentionKernels` is what `LatentAttention` holds; `ReferenceAttention` (plain PyTorch) and
`GpuAttention` implement it, chosen with the other kernels of a device. `VarlenAttention` and
`PageAttention` are what the second is put together from, an implementation per library.

Shapes and meaning: under the same names in `engine.kernels.reference`, `absorb_reference` and
`paged_reference`. Nothing here waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.attention.paged_queries import PagedQueries
from engine.formats.fp8_rows import Activation
from engine.kernels.rotation import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenLengths:
    """Sequences of a step that attend together, one after another.

    Attributes:
        lengths: per sequence its queries and its positions.
        cu_seqlens_q: [S + 1] int32 on the device, running sum of the queries.
        cu_seqlens_k: [S + 1] int32 on the device, running sum of the positions.
    """

    lengths: Sequence[tuple[int, int]]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


class AttentionKernels(Protocol):
    """Attention on one device."""

    @property
    def max_positions(self) -> int:
        """Context tokens that are expanded and attended to in one call.

        A longer context is attended to in parts. 0: one sequence a call, whatever its length.
        """
        ...

    def why_no_pages(self, cache: Tensor, kv_lora_rank: int) -> str:
        """Return why layers like `cache` are not read by block tables, or nothing.

        If there is a reason, neither `plan_paged` nor `paged_attention` is called.
        """
        ...

    def varlen_attention(
        self, q_THA: Tensor, k_PHA: Tensor, v_PHV: Tensor, seqs: VarlenLengths, scale: float
    ) -> Tensor:
        """Causal attention of several sequences with decompressed heads."""
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
        """Attention to a part of the positions, and the logarithm of its weight."""
        ...

    def merge_attention(
        self, out_THV: Tensor, lse_HT: Tensor, other_THV: Tensor, other_lse_HT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Merge two parts, in place of the first."""
        ...

    def absorbed_attention(
        self,
        q_SQHL: Tensor,
        latents_SPL: Tensor,
        hidden_SQP: Tensor,
        kv_lora_rank: int,
        scale: float,
    ) -> Tensor:
        """Attention over latents."""
        ...

    def plan_paged(self, queries: PagedQueries, cache: Tensor, num_heads: int) -> PagedQueries:
        """Add what attention to layers like `cache` prepares once a step, without a host read."""
        ...

    def absorb_queries(
        self,
        q_THA: Tensor,
        weight_HNC: Tensor,
        rotation: Rotation,
        cache: Tensor,
        queries: PagedQueries,
    ) -> Tensor:
        """Rotate queries and carry them into the latent space, for attention to `cache`.

        The rows come as `paged_attention` wants those of `queries`, which `plan_paged` has made.
        """
        ...

    def expand_values(
        self, latents_RHC: Tensor, weight_HVC: Tensor, queries: PagedQueries, *, fp8: bool
    ) -> Activation:
        """Take what `queries` attended to out of the latent space: [T, H * V], of every token."""
        ...

    def paged_attention(
        self, q_RHL: Tensor, cache: Tensor, queries: PagedQueries, kv_lora_rank: int, scale: float
    ) -> Tensor:
        """Attention over latents in the pool, found by block tables: [R, H, C].

        A row is a token, or a place of the rectangle where `queries` has one.
        """
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
        """See `AttentionKernels.plan_paged`."""
        ...

    def paged_attention(
        self, q_THL: Tensor, cache: Tensor, queries: PagedQueries, kv_lora_rank: int, scale: float
    ) -> Tensor:
        """Attend: [T, H, C]."""
        ...
