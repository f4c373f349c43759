"""Kernels for Hopper GPUs: FlashAttention-4, and our own Triton kernels between the products.

They run in bfloat16 with float32 inside. Operations whose shapes a fast kernel does not take go to
the reference.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from engine.attention import absorb_reference
from engine.attention.flash_mla import KV_LORA_RANK, FlashMLA
from engine.attention.paged_queries import PagedQueries
from engine.formats.base import Formats
from engine.formats.fp8_rows import Activation
from engine.invariants import require
from engine.kernels import reference
from engine.kernels.fused import (
    absorb,
    attention,
    latents,
    masked,
    norm,
    permute,
    quant,
    routing,
)
from engine.kernels.fused.dependent import break_chain
from engine.kernels.parts import PageAttention, VarlenAttention
from engine.kernels.rotation import Rotation
from engine.kernels.routing import RoutingRule


class HopperKernels:
    """See `Kernels`."""

    name = "hopper"
    max_attention_positions = 32768

    def __init__(
        self,
        *,
        formats: Formats,
        attention: VarlenAttention,
        paged: FlashMLA | None = None,
        pages: PageAttention | None = None,
    ) -> None:
        """Take the libraries that are there.

        Args:
            formats: that they multiply in.
            attention: of heads of any width.
            paged: of decode steps, for what it takes; None where it is not installed.
            pages: of everything else that is found by block tables; None in tests without it.
        """
        self.formats = formats
        self.varlen_attention = attention.varlen_attention
        self.varlen_attention_part = attention.varlen_attention_part
        self._paged = paged
        self._pages = pages

    silu_and_mul = staticmethod(reference.silu_and_mul)
    absorbed_attention = staticmethod(reference.absorbed_attention)
    add_rms_norm = staticmethod(norm.add_rms_norm)
    add_rms_norm_fp8 = staticmethod(norm.add_rms_norm_fp8)
    silu_and_mul_fp8 = staticmethod(quant.silu_and_mul_fp8)
    count_rows = staticmethod(permute.count_rows)
    moe_align_block_size = staticmethod(permute.moe_align_block_size)
    permute_rows = staticmethod(permute.permute_rows)
    unpermute_rows = staticmethod(permute.unpermute_rows)
    merge_attention = staticmethod(attention.merge_attention)
    moe_align_masked = staticmethod(masked.moe_align_masked)
    permute_masked_rows = staticmethod(masked.permute_masked_rows)
    rotate_queries = staticmethod(latents.rotate_queries)
    store_latents = staticmethod(latents.store_latents)
    split_latents = staticmethod(latents.split_latents)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels`."""
        return norm.rms_norm(x, weight, eps) if x.dim() == 2 else reference.rms_norm(x, weight, eps)

    def gate_logits(self, hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """See `Kernels`."""
        if routing.is_better_in_parts(hidden_TD, weight_ED):
            return routing.score_in_parts(hidden_TD, weight_ED)
        return routing.score(hidden_TD, weight_ED)

    def group_limited_topk(
        self, logits_TE: Tensor, bias_E: Tensor, rule: RoutingRule, num_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        if routing.is_supported(logits_TE.shape[-1], rule):
            return routing.group_limited_topk(logits_TE, bias_E, rule, num_rows)
        logits_TE = logits_TE if logits_TE.dim() == 2 else logits_TE.sum(0)
        return reference.group_limited_topk(logits_TE, bias_E, rule, num_rows)

    def join_keys(self, k_nope_PHN: Tensor, k_pe_PR: Tensor) -> Tensor:
        """See `Kernels`."""
        sizes: Sequence[int] = (k_nope_PHN.shape[2], k_pe_PR.shape[1])
        if any(size & (size - 1) for size in sizes):
            return reference.join_keys(k_nope_PHN, k_pe_PR)
        return latents.join_keys(k_nope_PHN, k_pe_PR)

    def absorb_queries(
        self, q_THA: Tensor, weight_HNC: Tensor, rotation: Rotation, cache: Tensor
    ) -> Tensor:
        """See `Kernels`."""
        if absorb.takes(weight_HNC):
            is_paged = self._paged is not None and self._paged.takes(cache)
            if is_paged:
                break_chain()  # FlashMLA, which comes next, begins when a kernel of ours lets it
            dtype = cache.dtype if is_paged else q_THA.dtype
            return absorb.absorb_queries(q_THA, weight_HNC, rotation, dtype)
        return absorb_reference.carry(latents.rotate_queries(q_THA, rotation), weight_HNC)

    def expand_values(self, latents_THC: Tensor, weight_HVC: Tensor, *, fp8: bool) -> Activation:
        """See `Kernels`."""
        if absorb.takes(weight_HVC):
            return absorb.expand_values(latents_THC, weight_HVC, fp8=fp8)
        values = absorb_reference.expand(latents_THC, weight_HVC)
        return quant.quantize_rows(values) if fp8 else values

    def why_no_pages(self, cache: Tensor, kv_lora_rank: int) -> str:
        """See `Kernels`."""
        return "no kernel" if self._pages is None else self._pages.why_not(cache, kv_lora_rank)

    def plan_paged(self, queries: PagedQueries, cache: Tensor, num_heads: int) -> PagedQueries:
        """See `Kernels`."""
        if queries.counts is None and self._paged is not None and self._paged.takes(cache):
            schedule = self._paged.schedule(queries.seq_lens_S, num_heads, cache.dtype)
            return replace(queries, schedule=schedule)
        assert self._pages is not None, "pages that `why_no_pages` speaks against"
        return self._pages.plan(queries, cache, num_heads)

    def paged_attention(
        self, q_THL: Tensor, cache: Tensor, queries: PagedQueries, kv_lora_rank: int, scale: float
    ) -> Tensor:
        """See `Kernels`."""
        if queries.schedule is not None:
            assert self._paged is not None
            is_wide = kv_lora_rank == KV_LORA_RANK
            require(is_wide, "latents", kv_lora_rank, f"FlashMLA takes {KV_LORA_RANK} numbers")
            break_chain()  # its last kernel may end before its first one has
            return self._paged.paged_attention(q_THL, cache, queries, queries.schedule, scale)
        assert self._pages is not None
        return self._pages.paged_attention(q_THL, cache, queries, kv_lora_rank, scale)
