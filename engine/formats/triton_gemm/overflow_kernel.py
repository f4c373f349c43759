"""The kernels of `overflow`: experts over rows whose number is read on the device.

A fixed number of programs shares out the tiles of the rows in use. As in the GEMM (`product`), a
tile adds up partial sums of 128 numbers along K, each times the scales of rows and weight, in
float32.

Legend: T tokens, D hidden size, F expert width, V rows behind the capacity.

This module is compiled by Triton and is imported only where that is installed.
"""

import triton
import triton.language as tl

from engine.formats.triton_gemm.byte_quant import _quantize_tile as _quantize_tile_by_hand
from engine.formats.triton_gemm.product import _widen
from engine.kernels.fused.launch import launched
from engine.kernels.fused.quant import _quantize_tile


@triton.jit
def _multiply(
    a_tile, a_scales, scale_column, b_tile, b_scales, depth,
    WIDEN: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Return float32 [M, 128]: rows times a block of 128 columns of a weight."""
    total = tl.zeros((M, 128), tl.float32)
    for step in range(0, depth // 128):
        x = tl.load(a_tile)
        y = tl.load(b_tile)
        x_scale = tl.load(a_scales + step * scale_column)
        y_scale = tl.load(b_scales + step)
        part = tl.dot(_widen(x), _widen(y)) if WIDEN else tl.dot(x, y)
        total += part * (x_scale * y_scale)[:, None]
        a_tile += 128
        b_tile += 128
    if WIDEN:
        total *= 65536.0  # of both factors' 256
    return total


@launched("row_scale", "column_scale", "out_scale_column", "num_tokens", "capacity")
def up(
    data, scale, tokens, ends, experts, weight, weight_scale, out, out_scale,
    row_stride, num_experts, depth, width,
    row_scale, column_scale, out_scale_column, num_tokens, capacity,
    WIDEN: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Gate and up, activated and quantised: out [V, F] of the rows that `tokens` names."""
    num_behind = tl.maximum(tl.load(ends + num_experts - 1) - capacity, 0)
    tiles_n = width // 128
    for tile in range(tl.program_id(0), num_behind // M * tiles_n, tl.num_programs(0)):
        first, block = tile // tiles_n * M, tile % tiles_n
        row = first + tl.arange(0, M)
        column, k = block * 128 + tl.arange(0, 128), tl.arange(0, 128)
        # A row of no token reads some token's; nobody reads what comes of it.
        token = tl.load(tokens + row)
        token = tl.minimum(tl.maximum(token, 0), num_tokens - 1).to(tl.int64)
        a_tile = data + token[:, None] * row_stride + k[None, :]
        a_scales = scale + token * row_scale
        expert = tl.load(experts + first).to(tl.int64)
        b_tile = weight + (expert * 2 * width + column[None, :]) * depth + k[:, None]
        b_scales = weight_scale + (expert * 2 * tiles_n + block) * (depth // 128)
        gate = _multiply(a_tile, a_scales, column_scale, b_tile, b_scales, depth, WIDEN, M)
        b_tile += width.to(tl.int64) * depth
        b_scales += tiles_n * (depth // 128)
        up = _multiply(a_tile, a_scales, column_scale, b_tile, b_scales, depth, WIDEN, M)
        # As where they are written in between.
        gate, up = gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up
        if WIDEN:
            numbers, scales = _quantize_tile_by_hand(value)
        else:
            numbers, scales = _quantize_tile(value)
        wide = row.to(tl.int64)
        tl.store(out + wide[:, None] * width + column[None, :], numbers)
        tl.store(out_scale + block.to(tl.int64) * out_scale_column + wide, scales)


@launched("scale_column", "capacity")
def down(
    data, scale, ends, experts, weight, weight_scale, out,
    num_experts, depth, width, scale_column, capacity,
    WIDEN: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Out [V, D] of the activated rows [V, F]."""
    num_behind = tl.maximum(tl.load(ends + num_experts - 1) - capacity, 0)
    tiles_n = width // 128
    for tile in range(tl.program_id(0), num_behind // M * tiles_n, tl.num_programs(0)):
        first, block = tile // tiles_n * M, tile % tiles_n
        row = (first + tl.arange(0, M)).to(tl.int64)
        column, k = block * 128 + tl.arange(0, 128), tl.arange(0, 128)
        expert = tl.load(experts + first).to(tl.int64)
        a_tile = data + row[:, None] * depth + k[None, :]
        b_tile = weight + (expert * width + column[None, :]) * depth + k[:, None]
        b_scales = weight_scale + (expert * tiles_n + block) * (depth // 128)
        total = _multiply(a_tile, scale + row, scale_column, b_tile, b_scales, depth, WIDEN, M)
        tl.store(out + row[:, None] * width + column[None, :], total.to(tl.bfloat16))
