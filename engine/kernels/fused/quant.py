"""Quantise rows to FP8.

Bound by memory: every element is read once and written once. A program takes 32 rows of one group
of 128, so that the scales it writes are one run of the column-major scales.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.formats.fp8_rows import GROUP, MIN_AMAX, Fp8Rows
from engine.invariants import require
from engine.kernels.fused.launch import ceil_div, launched

BLOCK_T = 32
E4M3_MAX = tl.constexpr(448.0)
LEAST_AMAX = tl.constexpr(MIN_AMAX)


@triton.jit
def _quantize_tile(x):
    """Return e4m3 [T, 128] and scale [T] of float32 [T, 128]."""
    amax = tl.max(tl.abs(x), axis=1)
    scale = tl.maximum(amax, LEAST_AMAX) / E4M3_MAX
    quantized = tl.clamp(x / scale[:, None], -E4M3_MAX, E4M3_MAX)
    # On a GPU neither a maximum nor a clamp passes NaN on: a row of it would become numbers.
    num_nan = tl.sum((x != x).to(tl.int32), axis=1)
    return quantized.to(tl.float8e4nv), tl.where(num_nan > 0, float("nan"), scale)


@launched("row_stride", "group_stride", "num_rows")
def _quantize_rows(
    x, data, scale, x_stride, data_stride, row_stride, group_stride, num_rows, B: tl.constexpr
):
    group = tl.program_id(1)
    rows = tl.program_id(0) * B + tl.arange(0, B)
    columns = group * 128 + tl.arange(0, 128)
    mask = (rows < num_rows)[:, None]
    wide = rows.to(tl.int64)[:, None]
    tile = tl.load(x + wide * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    quantized, scales = _quantize_tile(tile)
    tl.store(data + wide * data_stride + columns[None, :], quantized, mask=mask)
    place = scale + group.to(tl.int64) * group_stride + rows.to(tl.int64) * row_stride
    tl.store(place, scales, mask=rows < num_rows)


def quantize_rows(x_TK: Tensor, out: Fp8Rows | None = None) -> Fp8Rows:
    """Quantise [T, K] with unit stride along K; K is a multiple of 128; `out` of any layout."""
    num_rows, num_columns = x_TK.shape
    if out is None:
        out = Fp8Rows.empty(num_rows, num_columns, x_TK.device)
    require(
        x_TK.stride(1) == 1 and out.data_TK.shape == x_TK.shape,
        "rows to be quantised",
        (tuple(x_TK.shape), x_TK.stride(), tuple(out.data_TK.shape)),
        "no gaps, and room of the same size, are wanted",
    )
    if num_rows:
        _quantize_rows(
            (ceil_div(num_rows, BLOCK_T), num_columns // GROUP),
            (x_TK, out.data_TK, out.scale_TG),
            (x_TK.stride(0), out.data_TK.stride(0)),
            (*out.scale_TG.stride(), num_rows),
            (BLOCK_T,),
        )
    return out
