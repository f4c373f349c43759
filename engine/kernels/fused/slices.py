"""Add slices of several ranks in float32, in one pass: the end of a reduce-scatter.

Bound by memory: every slice is read once, and the sum is rounded and written once.
"""

import torch
import triton.language as tl
from torch import Tensor

from engine.invariants import require
from engine.kernels.fused.launch import ceil_div, launched

BLOCK = 2048
"""Numbers of the sum that a program makes."""


@launched()
def _sum_slices(
    slices, residual, out, stride, size, R: tl.constexpr, B: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    mask = index < size
    total = tl.zeros([B], tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + index, mask=mask, other=0.0).to(tl.float32)
    for r in tl.static_range(R):
        total += tl.load(slices + r * stride + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=mask)


def sum_slices(
    slices_RTD: Tensor, out_TD: Tensor | None = None, *, residual_TD: Tensor | None = None
) -> Tensor:
    """Return the sum over the first dimension, plus a residual; see `reference`.

    Each slice, the residual and `out_TD` are contiguous.
    """
    if out_TD is None:
        out_TD = torch.empty(slices_RTD.shape[1:], dtype=slices_RTD.dtype, device=slices_RTD.device)
    parts = [slices_RTD[0], out_TD, *([] if residual_TD is None else [residual_TD])]
    require(
        all(part.is_contiguous() and part.shape == slices_RTD.shape[1:] for part in parts),
        "slices, room and residual",
        [(tuple(part.shape), part.stride()) for part in parts],
        "contiguous ones of the same size are wanted",
    )
    size = out_TD.numel()
    if size:
        _sum_slices(
            (ceil_div(size, BLOCK),),
            (slices_RTD, out_TD if residual_TD is None else residual_TD, out_TD),
            (slices_RTD.stride(0), size),
            constants=(slices_RTD.shape[0], BLOCK, residual_TD is not None),
        )
    return out_TD
