"""The reference operations as a set of kernels: CPUs, and any device without faster ones."""

from torch import Tensor

from engine.attention import absorb_reference, paged_reference
from engine.attention.paged_queries import PagedQueries
from engine.kernels import aligned_reference, masked_reference, reference
from engine.kernels.base import VarlenLengths
from engine.ops.op import Target
from engine.ops.table import resolve_ops


class PortableKernels:
    """See `Kernels`; FP8 operations exist so that tests can run the FP8 path anywhere.

    Attributes:
        has_fp8: normally false: weights are dequantised at load, which is faster without hardware.
        has_paged_attention: whether it attends by block tables; normally false: in groups of
            sequences it is faster on a CPU.
    """

    name = "portable"
    max_attention_positions = 0

    def __init__(self, *, has_fp8: bool = False, has_paged_attention: bool = False) -> None:
        self.has_fp8 = has_fp8
        self.has_paged_attention = has_paged_attention
        self.ops = resolve_ops(Target.PORTABLE)

    quantize_rows = staticmethod(reference.quantize_rows)
    fp8_linear = staticmethod(reference.fp8_linear)
    grouped_mlp = staticmethod(reference.grouped_mlp)
    merge_attention = staticmethod(reference.merge_attention)
    absorbed_attention = staticmethod(reference.absorbed_attention)
    absorb_queries = staticmethod(absorb_reference.absorb_queries)
    expand_values = staticmethod(absorb_reference.expand_values)
    paged_attention = staticmethod(paged_reference.paged_attention)
    grouped_fp8_mlp = staticmethod(aligned_reference.grouped_fp8_mlp)
    masked_fp8_mlp = staticmethod(masked_reference.masked_fp8_mlp)

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
