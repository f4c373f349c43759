"""Kernels for Hopper GPUs: DeepGEMM, FlashAttention-4, and our own Triton kernels between them.

Products run in FP8 with the weights as the checkpoint stores them; everything else in bfloat16 with
float32 inside. Operations whose shapes a fast kernel does not take go to the reference.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.attention import absorb_reference
from engine.attention.flash_mla import KV_LORA_RANK, FlashMLA
from engine.attention.paged_queries import PagedQueries
from engine.formats.fp8_rows import Activation, Fp8Rows
from engine.invariants import require
from engine.kernels import reference
from engine.kernels.alignment import Overflow
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
from engine.kernels.masked_rows import MaskedRows
from engine.kernels.parts import (
    BlockGemm,
    MaskedMlp,
    OverflowMlp,
    PageAttention,
    VarlenAttention,
)
from engine.kernels.rotation import Rotation
from engine.kernels.routing import RoutingRule


class HopperKernels:
    """See `Kernels`."""

    name = "hopper"
    has_fp8 = True
    max_attention_positions = 32768

    def __init__(
        self,
        *,
        gemm: BlockGemm,
        overflow: OverflowMlp,
        attention: VarlenAttention,
        paged: FlashMLA | None = None,
        pages: PageAttention | None = None,
        experts: MaskedMlp | None = None,
    ) -> None:
        """Take the libraries that are there.

        Args:
            gemm: for all FP8 products.
            overflow: for experts' rows behind the capacity.
            attention: of heads of any width.
            paged: of decode steps, for what it takes; None where it is not installed.
            pages: of everything else that is found by block tables; None in tests without it.
            experts: over few masked rows; what it does not take `gemm` multiplies.
        """
        self._gemm = gemm
        self._overflow = overflow
        self.varlen_attention = attention.varlen_attention
        self.varlen_attention_part = attention.varlen_attention_part
        self._paged = paged
        self._pages = pages
        self._experts = experts

    silu_and_mul = staticmethod(reference.silu_and_mul)
    grouped_mlp = staticmethod(reference.grouped_mlp)
    absorbed_attention = staticmethod(reference.absorbed_attention)
    add_rms_norm = staticmethod(norm.add_rms_norm)
    add_rms_norm_fp8 = staticmethod(norm.add_rms_norm_fp8)
    silu_and_mul_fp8 = staticmethod(quant.silu_and_mul_fp8)
    quantize_rows = staticmethod(quant.quantize_rows)
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

    def fp8_linear(self, x: Fp8Rows, weight_NK: Tensor, scale_inv_PQ: Tensor) -> Tensor:
        """See `Kernels`."""
        return self._gemm.linear(x, weight_NK, scale_inv_PQ)

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

    def grouped_fp8_mlp(
        self,
        rows: Fp8Rows,
        expert_M: Tensor,
        w13: tuple[Tensor, Tensor],
        w2: tuple[Tensor, Tensor],
        overflow: Overflow | None = None,
    ) -> Tensor:
        """See `Kernels`."""
        parts = self._gemm, quant.silu_and_mul_fp8, self._overflow
        return grouped_fp8_mlp(*parts, rows, expert_M, w13=w13, w2=w2, overflow=overflow)

    def masked_fp8_mlp(
        self, rows: MaskedRows, w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]
    ) -> Tensor:
        """See `Kernels`."""
        if self._experts is not None and self._experts.takes(rows, w13, w2):
            return self._experts.masked_fp8_mlp(rows, w13, w2)
        gate_up = self._gemm.masked_linear(rows, *w13)
        return self._gemm.masked_linear(masked.masked_silu_and_mul_fp8(gate_up, rows), *w2)

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
        paged, dtype = self._paged, cache.dtype
        if paged is not None and paged.takes(cache) and paged.takes_queries(queries, dtype):
            return paged.plan(queries, num_heads, dtype)
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


def grouped_fp8_mlp(
    gemm: BlockGemm,
    activate: Callable[[Tensor, Tensor], Fp8Rows],
    overflow_mlp: OverflowMlp,
    rows: Fp8Rows,
    expert_M: Tensor,
    *,
    w13: tuple[Tensor, Tensor],
    w2: tuple[Tensor, Tensor],
    overflow: Overflow | None,
) -> Tensor:
    """Run the experts over the rows before the capacity, and over those behind it, by these parts.

    Arguments and result are those of `aligned_reference.grouped_fp8_mlp`.
    """
    capacity, num_rows = rows.num_rows, expert_M.shape[0]
    assert capacity == num_rows or overflow is not None, (capacity, num_rows)
    out_MD = torch.empty(
        (num_rows, w2[0].shape[1]), dtype=torch.bfloat16, device=rows.data_TK.device
    )
    expert_C = expert_M[:capacity]
    hidden = activate(gemm.grouped_linear(rows, expert_C, *w13), expert_C)
    gemm.grouped_linear(hidden, expert_C, *w2, out=out_MD[:capacity])
    if overflow is not None:
        overflow_mlp.run(overflow, expert_M[capacity:], w13, w2, out_MD[capacity:])
    return out_MD
