"""Attention on GPUs, put together of libraries and of our own Triton kernels.

Steps of decode, and suffixes of equally many queries, go to FlashMLA where it is and takes them,
everything else that is found by block tables to our paged kernel; decompressed heads to the fastest
library that takes them.
"""

from torch import Tensor

from engine.attention import absorb_reference
from engine.attention.flash_mla import KV_LORA_RANK, FlashMLA
from engine.attention.kernels import PageAttention, VarlenAttention
from engine.attention.paged_queries import PagedQueries
from engine.formats.fp8_rows import Activation
from engine.invariants import require
from engine.kernels import reference
from engine.kernels.fused import absorb, attention, quant
from engine.kernels.fused.dependent import break_chain
from engine.kernels.rotation import Rotation
from engine.ops import latents_kernel


class GpuAttention:
    """See `AttentionKernels`."""

    max_positions = 32768

    def __init__(
        self,
        *,
        heads: VarlenAttention,
        pages: PageAttention | None = None,
        flash_mla: FlashMLA | None = None,
        fuses_absorption: bool = True,
    ) -> None:
        """Take the libraries that are there.

        Args:
            heads: for decompressed heads of any width.
            pages: for what is found by block tables; None in tests without it.
            flash_mla: for what it takes of that; None where it is not installed.
            fuses_absorption: whether queries and values pass the latent space by kernels of ours,
                which are for Hopper, or by plain PyTorch.
        """
        self.varlen_attention = heads.varlen_attention
        self.varlen_attention_part = heads.varlen_attention_part
        self._pages = pages
        self._flash_mla = flash_mla
        self._fuses_absorption = fuses_absorption

    merge_attention = staticmethod(attention.merge_attention)
    absorbed_attention = staticmethod(reference.absorbed_attention)

    def absorb_queries(
        self,
        q_THA: Tensor,
        weight_HNC: Tensor,
        rotation: Rotation,
        cache: Tensor,
        queries: PagedQueries,
    ) -> Tensor:
        """See `AttentionKernels`."""
        if not self._fuses_absorption:
            return absorb_reference.absorb_queries(q_THA, weight_HNC, rotation, cache, queries)
        if absorb.takes(weight_HNC):
            is_library_s = queries.schedule is not None
            if is_library_s:
                break_chain()  # FlashMLA, which comes next, begins when a kernel of ours lets it
            dtype = cache.dtype if is_library_s else q_THA.dtype
            rows_R = None if queries.rectangle is None else queries.rectangle.rows
            return absorb.absorb_queries(q_THA, weight_HNC, rotation, dtype, rows_R=rows_R)
        rotated = latents_kernel.rotate_queries(q_THA, rotation)
        return absorb_reference.spread(absorb_reference.carry(rotated, weight_HNC), queries)

    def expand_values(
        self, latents_RHC: Tensor, weight_HVC: Tensor, queries: PagedQueries, *, fp8: bool
    ) -> Activation:
        """See `AttentionKernels`."""
        if not self._fuses_absorption:
            return absorb_reference.expand_values(latents_RHC, weight_HVC, queries, fp8=fp8)
        if absorb.takes(weight_HVC):
            places_T = None if queries.rectangle is None else queries.rectangle.places
            return absorb.expand_values(latents_RHC, weight_HVC, fp8=fp8, places_T=places_T)
        latents_THC = absorb_reference.collect(latents_RHC, queries)
        values = absorb_reference.expand(latents_THC, weight_HVC)
        return quant.quantize_rows(values) if fp8 else values

    def why_no_pages(self, cache: Tensor, kv_lora_rank: int) -> str:
        """See `AttentionKernels`."""
        return "no kernel" if self._pages is None else self._pages.why_not(cache, kv_lora_rank)

    def plan_paged(self, queries: PagedQueries, cache: Tensor, num_heads: int) -> PagedQueries:
        """See `AttentionKernels`."""
        library, dtype = self._flash_mla, cache.dtype
        if library is not None and library.takes(cache) and library.takes_queries(queries, dtype):
            return library.plan(queries, num_heads, dtype)
        assert self._pages is not None, "pages that `why_no_pages` speaks against"
        return self._pages.plan(queries, cache, num_heads)

    def paged_attention(
        self, q_RHL: Tensor, cache: Tensor, queries: PagedQueries, kv_lora_rank: int, scale: float
    ) -> Tensor:
        """See `AttentionKernels`."""
        if queries.schedule is not None:
            assert self._flash_mla is not None
            is_wide = kv_lora_rank == KV_LORA_RANK
            require(is_wide, "latents", kv_lora_rank, f"FlashMLA takes {KV_LORA_RANK} numbers")
            break_chain()  # its last kernel may end before its first one has
            return self._flash_mla.paged_attention(q_RHL, cache, queries, queries.schedule, scale)
        assert self._pages is not None
        return self._pages.paged_attention(q_RHL, cache, queries, kv_lora_rank, scale)
