"""Attention of decompressed heads by what PyTorch brings along.

Two ways. On a CUDA device with 16-bit heads, PyTorch's build of FlashAttention-2 takes all
sequences in one call; it wants values as wide as keys, so they are padded with zeros and the result
is cut. Elsewhere each sequence is one call of scaled_dot_product_attention.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.kernels import VarlenLengths
from engine.kernels import reference

MAX_FLASH_HEAD = 256
"""Widest head of the one-call way; a multiple of 8 there."""


class TorchAttention:
    """See `engine.attention.flash_attention.FlashAttention`, whose methods these are."""

    def takes(self, q_THA: Tensor, v_PHV: Tensor) -> bool:
        """See `VarlenAttention`: all heads."""
        return True

    def describe(self, q_THA: Tensor, v_PHV: Tensor) -> str:
        """See `VarlenAttention`."""
        if _takes_flash(q_THA, v_PHV):
            return "PyTorch's FlashAttention-2"
        return "PyTorch, one sequence after another"

    def varlen_attention(
        self, q_THA: Tensor, k_PHA: Tensor, v_PHV: Tensor, seqs: VarlenLengths, scale: float
    ) -> Tensor:
        """Return [T, H, V]; the queries of a sequence are its last positions."""
        if _takes_flash(q_THA, v_PHV):
            return _attend_together(q_THA, k_PHA, v_PHV, seqs, scale)[0]
        queries, positions = ([pair[i] for pair in seqs.lengths] for i in (0, 1))
        parts = zip(
            q_THA.split_with_sizes(queries),
            k_PHA.split_with_sizes(positions),
            v_PHV.split_with_sizes(positions),
            strict=True,
        )
        return torch.cat([_attend_alone(q, k, v, scale) for q, k, v in parts])

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
        """Return [T, H, V] and [H, T] float32; see `reference.varlen_attention_part`."""
        if _takes_flash(q_THA, v_PHV):
            out, lse = _attend_together(q_THA, k_PHA, v_PHV, seqs, scale, is_causal=is_causal)
            return out.contiguous(), lse
        # The only public call of PyTorch that tells the weights is the one above.
        return reference.varlen_attention_part(
            q_THA, k_PHA, v_PHV, seqs.lengths, scale, is_causal=is_causal
        )


def _takes_flash(q_THA: Tensor, v_PHV: Tensor) -> bool:
    width = q_THA.shape[2]
    return (
        q_THA.is_cuda
        and q_THA.dtype in (torch.bfloat16, torch.float16)
        and v_PHV.shape[2] <= width <= MAX_FLASH_HEAD
        and width % 8 == 0
        and torch.backends.cuda.is_flash_attention_available()
    )


def _attend_together(
    q_THA: Tensor,
    k_PHA: Tensor,
    v_PHV: Tensor,
    seqs: VarlenLengths,
    scale: float,
    *,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return [T, H, V], a view, and the logarithm of the sum of each softmax, [H, T] float32."""
    # Brings torch._dynamo along, which takes a process without a GPU longer than torch itself.
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    width = v_PHV.shape[2]
    out, lse = varlen_attn(
        q_THA,
        k_PHA,
        F.pad(v_PHV, (0, q_THA.shape[2] - width)),
        seqs.cu_seqlens_q,
        seqs.cu_seqlens_k,
        max(queries for queries, _ in seqs.lengths),
        max(positions for _, positions in seqs.lengths),
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=(-1, 0 if is_causal else -1),  # causal: aligned at the last position
    )
    return out[..., :width], lse


def _attend_alone(q_QHA: Tensor, k_PHA: Tensor, v_PHV: Tensor, scale: float) -> Tensor:
    """Attend in one sequence; [Q, H, V]."""
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q_QHA, k_PHA, v_PHV))
    num_queries, num_positions = q.shape[2], k.shape[2]
    out: Tensor
    if num_queries == num_positions:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        mask = q.new_ones((num_queries, num_positions), dtype=torch.bool).tril(
            num_positions - num_queries
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.squeeze(0).transpose(0, 1)
