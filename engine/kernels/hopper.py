"""Kernels for Hopper GPUs: our own, in Triton, between products and attention.

They run in bfloat16 with float32 inside. Operations whose shapes a fast kernel does not take go to
the reference.
"""

from collections.abc import Sequence

from torch import Tensor

from engine.attention.kernels import AttentionKernels
from engine.formats.base import Formats
from engine.kernels import reference
from engine.kernels.fused import (
    latents,
    masked,
    norm,
    permute,
    quant,
    routing,
)
from engine.kernels.routing import RoutingRule


class HopperKernels:
    """See `Kernels`."""

    name = "hopper"

    def __init__(self, *, formats: Formats, attention: AttentionKernels) -> None:
        """Take what multiplies and what attends."""
        self.formats, self.attention = formats, attention

    silu_and_mul = staticmethod(reference.silu_and_mul)
    add_rms_norm = staticmethod(norm.add_rms_norm)
    add_rms_norm_fp8 = staticmethod(norm.add_rms_norm_fp8)
    silu_and_mul_fp8 = staticmethod(quant.silu_and_mul_fp8)
    count_rows = staticmethod(permute.count_rows)
    moe_align_block_size = staticmethod(permute.moe_align_block_size)
    permute_rows = staticmethod(permute.permute_rows)
    unpermute_rows = staticmethod(permute.unpermute_rows)
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
