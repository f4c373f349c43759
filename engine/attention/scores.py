"""Scores of attention in float32, whatever type queries and keys have.

Rounded to bfloat16, a score of 20 is off by up to 0.06, so its weight by 6 %: what a prompt is
answered would depend on how its attention was computed. Products of two 16-bit numbers are exact
in float32, and all fast kernels keep them so.
"""

import torch
from torch import Tensor


def as_factor(x: Tensor) -> Tensor:
    """Return `x` as `multiply_scores` wants it: no CPU multiplies 16 bits into 32-bit sums."""
    return x.float() if x.dtype.itemsize < 4 and not x.is_cuda else x


def multiply_scores(q_BMK: Tensor, k_BKN: Tensor) -> Tensor:
    """Return the products [B, M, N] of two `as_factor`s, in float32."""
    if q_BMK.dtype.itemsize < 4:
        return torch.bmm(q_BMK, k_BKN, out_dtype=torch.float32)
    return torch.bmm(q_BMK, k_BKN).float()


def softmax_(scores: Tensor) -> Tensor:
    """Turn scores into probabilities over the last dimension, in place, and return them."""
    scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    return scores.div_(scores.sum(dim=-1, keepdim=True))
