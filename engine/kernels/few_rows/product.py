"""The product of few rows, in Triton: out[M, N] = x[M, K] x w[N, K], K cut into parts.

What such a product costs is the reading of its weight, so everything serves that: weights are the
first operand of the tensor cores, whose 64 rows activations could not fill; K is split over
programs until all multiprocessors read at once; and each program keeps several steps of 128
numbers along K in flight. Parts of a sum wait in float32, and the program that comes last to a tile
adds them up in the order of K, whoever came when: results do not depend on the timing.

This module is compiled by Triton and is imported only where that is installed.
"""

import triton
import triton.language as tl

from engine.kernels.fused.launch import launched


@triton.jit
def _row_scales(scales, row, num_rows, IS_FULL: tl.constexpr):
    """Return the scales of all rows in one step; not by clamped places, which take registers."""
    if IS_FULL:
        return tl.load(scales)
    return tl.load(scales, mask=row < num_rows, other=0.0)


@triton.jit
def _sum_parts(
    parts, out, tile, num_rows, num_columns,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the parts of a tile's sum, a few rows at a time, and write the result."""
    inside = tl.arange(0, BLOCK_N)[None, :]
    column = tile * BLOCK_N + inside
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < num_rows) & (column < num_columns)
        source = parts + row * BLOCK_N + inside
        total = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for split in tl.static_range(SPLITS):
            part = source + split * BLOCK_N * BLOCK_M
            # Not from this multiprocessor's own cache, which others' writes do not reach.
            total += tl.load(part, mask=mask, cache_modifier=".cg")
        tl.store(out + row.to(tl.int64) * num_columns + column, total.to(tl.bfloat16), mask=mask)


@launched("scale_group", "num_rows")
def multiply(
    x, x_scale, weight, weight_scale, out, partial, arrivals,
    x_stride, num_columns, depth, scale_row, scale_group, num_rows,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr,
    IS_FULL: tl.constexpr, SUM_ROWS: tl.constexpr, AHEAD: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Make one tile [BLOCK_N, BLOCK_M] of the turned result, or a part of its sum.

    `partial` is [tiles, SPLITS, BLOCK_M, BLOCK_N] float32, `arrivals` [tiles] int32 zeros, and
    zeros again afterwards. IS_FULL says that there are BLOCK_M rows, whose scales lie column after
    column without gaps. SUM_ROWS are added up at a time; if 0, `partial` is all that is written.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    blocks = depth // 128
    start = split * (blocks // UNROLL) // SPLITS * UNROLL
    end = (split + 1) * (blocks // UNROLL) // SPLITS * UNROLL

    # Rows and columns past the end read the last one, and are not stored.
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    near_column = tl.minimum(column, num_columns - 1).to(tl.int64)
    near_row = row
    if IS_FULL:
        scale_group = BLOCK_M
        x_scales = x_scale + row
    else:
        near_row = tl.minimum(row, num_rows - 1)
        x_scales = x_scale + row * scale_row
    k = start * 128 + tl.arange(0, 128)
    w_tile = weight + near_column[:, None] * depth + k[None, :]
    x_tile = x + near_row[None, :] * x_stride + k[:, None]
    if BLOCK_N <= 128:
        w_scales = weight_scale + tile * BLOCK_N // 128 * blocks
    else:
        w_scales = weight_scale + near_column // 128 * blocks

    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # Read a step ahead, or in the shadow of the product: nothing else hides how long that takes.
    x_factor = _row_scales(x_scales + start * scale_group, row, num_rows, IS_FULL)
    w_factor = tl.load(w_scales + start)
    for step in range(start, end, UNROLL):
        for u in tl.static_range(UNROLL):
            w = tl.load(w_tile + u * 128)
            y = tl.load(x_tile + u * 128)
            if not AHEAD:
                x_factor = _row_scales(x_scales + (step + u) * scale_group, row, num_rows, IS_FULL)
                w_factor = tl.load(w_scales + step + u)
            part = tl.dot(w, y)
            if BLOCK_N <= 128:
                total += part * (x_factor * w_factor)[None, :]
            else:
                total += part * x_factor[None, :] * w_factor[:, None]
            if AHEAD:
                ahead = tl.minimum(step + u + 1, blocks - 1)
                x_factor = _row_scales(x_scales + ahead * scale_group, row, num_rows, IS_FULL)
                w_factor = tl.load(w_scales + ahead)
        w_tile += UNROLL * 128
        x_tile += UNROLL * 128

    turned = tl.trans(total)
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    if SPLITS == 1:
        place = out + row[:, None].to(tl.int64) * num_columns + column[None, :]
        tl.store(place, turned.to(tl.bfloat16), mask=mask)
    else:
        parts = partial + tile * (SPLITS * BLOCK_M * BLOCK_N)
        place = (split * BLOCK_M + row[:, None]) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(parts + place, turned, mask=mask)
        if SUM_ROWS > 0:
            # All threads' numbers are written before one of them says so.
            tl.debug_barrier()
            if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
                tl.store(arrivals + tile, 0)
                _sum_parts(
                    parts, out, tile, num_rows, num_columns, BLOCK_N, BLOCK_M, SPLITS, SUM_ROWS
                )
