"""The reference operations as a set of kernels: CPUs, and any device without faster ones."""

import torch.nn.functional as F
from torch import Tensor

from engine.attention import absorb_reference, paged_reference
from engine.attention.paged_queries import PagedQueries
from engine.formats.base import Formats
from engine.formats.fp8_block import Fp8Block
from engine.formats.fp8_products import ReferenceProducts
from engine.formats.fp8_rows import Fp8Rows
from engine.formats.plain import PLAIN
from engine.kernels import aligned_reference, masked_reference, reference
from engine.kernels.base import VarlenLengths


class PortableKernels:
    """See `Kernels`; FP8 operations exist so that tests can run the FP8 path anywhere.

    Attributes:
        formats: normally the plain one alone: weights are dequantised at load, which is faster
            without hardware.
        has_paged_attention: whether it attends by block tables; normally false: in groups of
            sequences it is faster on a CPU.
    """

    name = "portable"
    max_attention_positions = 0

    def __init__(
        self,
        *,
        has_fp8: bool = False,
        has_paged_attention: bool = False,
        formats: Formats | None = None,
    ) -> None:
        fp8 = (Fp8Block(ReferenceProducts()),) if has_fp8 else ()
        self.formats = formats or Formats(plain=PLAIN, quantized=fp8)
        self.has_paged_attention = has_paged_attention

    rms_norm = staticmethod(reference.rms_norm)
    silu_and_mul = staticmethod(reference.silu_and_mul)
    add_rms_norm_fp8 = staticmethod(reference.add_rms_norm_fp8)
    group_limited_topk = staticmethod(reference.group_limited_topk)
    count_rows = staticmethod(aligned_reference.count_rows)
    moe_align_block_size = staticmethod(aligned_reference.moe_align_block_size)
    permute_rows = staticmethod(aligned_reference.permute_rows)
    unpermute_rows = staticmethod(aligned_reference.unpermute_rows)
    rotate_queries = staticmethod(reference.rotate_queries)
    store_latents = staticmethod(reference.store_latents)
    join_keys = staticmethod(reference.join_keys)
    merge_attention = staticmethod(reference.merge_attention)
    absorbed_attention = staticmethod(reference.absorbed_attention)
    absorb_queries = staticmethod(absorb_reference.absorb_queries)
    expand_values = staticmethod(absorb_reference.expand_values)
    split_latents = staticmethod(absorb_reference.split_latents)
    paged_attention = staticmethod(paged_reference.paged_attention)
    moe_align_masked = staticmethod(masked_reference.moe_align_masked)
    permute_masked_rows = staticmethod(masked_reference.permute_masked_rows)

    def add_rms_norm(
        self, x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        total_TD = x_TD + delta_TD
        return total_TD, reference.rms_norm(total_TD, weight_D, eps)

    def silu_and_mul_fp8(self, gate_up_TF: Tensor) -> Fp8Rows:
        """See `Kernels`."""
        return reference.quantize_rows(reference.silu_and_mul(gate_up_TF.float()))

    def gate_logits(self, hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """See `Kernels`."""
        return F.linear(hidden_TD.float(), weight_ED.float())

    def varlen_attention(
        self, q_THA: Tensor, k_PHA: Tensor, v_PHV: Tensor, seqs: VarlenLengths, scale: float
    ) -> Tensor:
        """See `Kernels`."""
        return reference.varlen_attention(q_THA, k_PHA, v_PHV, seqs.lengths, scale)

    def why_no_pages(self, cache: Tensor, kv_lora_rank: int) -> str:
        """See `Kernels`."""
        return "" if self.has_paged_attention else "the reference attends in groups of sequences"

    def plan_paged(self, queries: PagedQueries, cache: Tensor, num_heads: int) -> PagedQueries:
        """See `Kernels`."""
        return queries

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
        """See `Kernels`."""
        return reference.varlen_attention_part(
            q_THA, k_PHA, v_PHV, seqs.lengths, scale, is_causal=is_causal
        )
