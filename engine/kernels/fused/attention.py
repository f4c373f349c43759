"""Merge attention to parts of a context: a weighted mean by what each part's softmax summed up to.

Bound by memory: both parts are read once, and the result replaces the first.
"""

import torch
import triton.language as tl
from torch import Tensor

from engine.invariants import require
from engine.kernels.fused.launch import ceil_div, launched, next_power_of_2

TOKENS = 32
"""Tokens of one head that a program merges."""


@launched("num_tokens")
def _merge(
    out, lse, other, other_lse, merged_lse, row_stride, head_stride, width, num_tokens,
    B: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * B + tl.arange(0, B)
    columns = tl.arange(0, V)
    is_token = tokens < num_tokens
    place = head * num_tokens + tokens
    low = float("-inf")
    first = tl.load(lse + place, mask=is_token, other=low)
    second = tl.load(other_lse + place, mask=is_token, other=low)
    top = tl.maximum(first, second)
    # Neither part saw anything: -inf minus -inf would be NaN.
    shift = tl.where(top == low, 0.0, top)
    first, second = tl.exp(first - shift), tl.exp(second - shift)
    total = first + second
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    # Not in place: the warps of a program hold copies of `lse`, and one may store before another
    # has loaded.
    tl.store(merged_lse + place, tl.where(is_empty, low, tl.log(total) + shift), mask=is_token)
    offset = tokens.to(tl.int64)[:, None] * row_stride + head * head_stride + columns[None, :]
    mask = is_token[:, None] & (columns < width)[None, :]
    mine = tl.load(out + offset, mask=mask, other=0.0).to(tl.float32)
    theirs = tl.load(other + offset, mask=mask, other=0.0).to(tl.float32)
    merged = mine * (first / total)[:, None] + theirs * (second / total)[:, None]
    tl.store(out + offset, merged.to(out.dtype.element_ty), mask=mask)


def merge_attention(
    out_THV: Tensor, lse_HT: Tensor, other_THV: Tensor, other_lse_HT: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge the second part into the first's values, in place; all contiguous. See `reference`."""
    tensors = (out_THV, lse_HT, other_THV, other_lse_HT)
    num_tokens, num_heads, width = out_THV.shape
    require(
        all(tensor.is_contiguous() for tensor in tensors)
        and other_THV.shape == out_THV.shape
        and lse_HT.shape == other_lse_HT.shape == (num_heads, num_tokens),
        "parts of attention",
        [tuple(tensor.shape) for tensor in tensors],
        "contiguous [T, H, V] and [H, T] are wanted, twice",
    )
    merged_HT = torch.empty_like(lse_HT)
    if num_tokens:
        _merge(
            (ceil_div(num_tokens, TOKENS), num_heads),
            (*tensors, merged_HT),
            (num_heads * width, width, width),
            (num_tokens,),
            (TOKENS, next_power_of_2(width)),
        )
    return out_THV, merged_HT
