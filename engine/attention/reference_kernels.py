"""Attention in plain PyTorch: CPUs, and any device without faster kernels."""

from torch import Tensor

from engine.attention import absorb_reference, paged_reference
from engine.attention.kernels import VarlenLengths
from engine.attention.paged_queries import PagedQueries
from engine.kernels import reference


class ReferenceAttention:
    """See `AttentionKernels`.

    Attributes:
        reads_pages: whether it attends by block tables; normally false: in groups of sequences it
            is faster on a CPU.
        max_positions: normally 0.
    """

    def __init__(self, *, reads_pages: bool = False, max_positions: int = 0) -> None:
        self.reads_pages, self.max_positions = reads_pages, max_positions

    merge_attention = staticmethod(reference.merge_attention)
    absorbed_attention = staticmethod(reference.absorbed_attention)
    absorb_queries = staticmethod(absorb_reference.absorb_queries)
    expand_values = staticmethod(absorb_reference.expand_values)
    paged_attention = staticmethod(paged_reference.paged_attention)

    def why_no_pages(self, cache: Tensor, kv_lora_rank: int) -> str:
        """See `AttentionKernels`."""
        return "" if self.reads_pages else "the reference attends in groups of sequences"

    def plan_paged(self, queries: PagedQueries, cache: Tensor, num_heads: int) -> PagedQueries:
        """See `AttentionKernels`; nothing is prepared."""
        return queries

    def varlen_attention(
        self, q_THA: Tensor, k_PHA: Tensor, v_PHV: Tensor, seqs: VarlenLengths, scale: float
    ) -> Tensor:
        """See `AttentionKernels`."""
        return reference.varlen_attention(q_THA, k_PHA, v_PHV, seqs.lengths, scale)

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
        """See `AttentionKernels`."""
        return reference.varlen_attention_part(
            q_THA, k_PHA, v_PHV, seqs.lengths, scale, is_causal=is_causal
        )
