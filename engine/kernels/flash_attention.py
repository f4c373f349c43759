"""Attention of decompressed heads by FlashAttention-4, the only place that knows it.

Its CuTe kernels run on Hopper with heads of 192 (queries, keys) and 128 (values), ragged over
sequences. The first call of a shape compiles for some seconds.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.kernels.base import VarlenLengths


def is_available() -> bool:
    """Return whether the library is installed and the GPU is a Hopper or newer."""
    return (
        importlib.util.find_spec("flash_attn") is not None
        and importlib.util.find_spec("flash_attn.cute") is not None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability()[0] >= 9
    )


class FlashAttention:
    """The kernel, with the library loaded."""

    def __init__(self) -> None:
        library = importlib.import_module("flash_attn.cute")
        self._run: Callable[..., Any] = library.flash_attn_varlen_func

    def varlen_attention(
        self, q_THA: Tensor, k_PHA: Tensor, v_PHV: Tensor, seqs: VarlenLengths, scale: float
    ) -> Tensor:
        """Return [T, H, V]; the queries of a sequence are its last positions.

        Values may be a strided view with unit stride along V.
        """
        out: Tensor = self._attend(q_THA, k_PHA, v_PHV, seqs, scale)[0]
        return out

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
        out, lse = self._attend(q_THA, k_PHA, v_PHV, seqs, scale, causal=is_causal, return_lse=True)
        return out, lse

    def _attend(
        self,
        q_THA: Tensor,
        k_PHA: Tensor,
        v_PHV: Tensor,
        seqs: VarlenLengths,
        scale: float,
        *,
        causal: bool = True,
        return_lse: bool = False,
    ) -> Any:
        """Return the library's pair; without `return_lse` the second is None."""
        return self._run(
            q_THA,
            k_PHA,
            v_PHV,
            cu_seqlens_q=seqs.cu_seqlens_q,
            cu_seqlens_k=seqs.cu_seqlens_k,
            max_seqlen_q=max(queries for queries, _ in seqs.lengths),
            max_seqlen_k=max(positions for _, positions in seqs.lengths),
            softmax_scale=scale,
            causal=causal,
            return_lse=return_lse,
        )
