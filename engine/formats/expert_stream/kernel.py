"""Products of few rows per expert, in Triton, made to stream weights at the speed of memory.

Decode multiplies a handful of rows with weights of gigabytes, so nothing counts but that reads of
weights never pause. Three ideas. Blocks of a weight are the large operand of the tensor cores and
rows the narrow one, so that no work is padding. Programs stay: each walks over its tiles in *one*
loop over (tile, step along K), so that the loads of the next tile are in flight while the last
steps and the result of this one are worked on. And a tile has two blocks of 128 rows of the
weight: neighbours, or a block of the gate and the one of `up` that it is multiplied with, so that
the activation and its quantisation are done where the sums are.

Experts without rows have no tiles; an expert with more rows than a tile has has several, whose
weights the second reads from the cache. How many there are is read on the device.

This module is compiled by Triton and is imported only where that is installed.
"""

import triton
import triton.language as tl

from engine.kernels.fused.quant import _quantize_tile


@triton.jit
def _find_tile(ends, tile, TILES_N: tl.constexpr):
    """Return the group, the tile of its rows, and the tile of columns; past the end: no group's."""
    slot = tile // TILES_N
    is_before = ends <= slot
    group = tl.sum(is_before.to(tl.int32), axis=0)
    first = tl.max(tl.where(is_before, ends, 0), axis=0)
    return group, slot - first, tile % TILES_N


@triton.jit
def _find_operands(
    tile, max_rows,
    WIDTH: tl.constexpr, GROUPS_K: tl.constexpr, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return where a tile's weight and rows begin, and where their scales do."""
    group, tile_m, column = tile
    weight_row = group * WIDTH + column * STRIDE
    weight_place = (group * (WIDTH // 128) + column * STRIDE // 128) * GROUPS_K
    x_row = group * max_rows + tile_m * BLOCK_M
    x_place = (group * GROUPS_K).to(tl.int64) * max_rows + tile_m * BLOCK_M
    return weight_row, weight_place, x_row, x_place


@triton.jit
def _multiply(
    low, high, weight, weight_scale, x, x_scale, operands, k, max_rows,
    SECOND: tl.constexpr, GROUPS_K: tl.constexpr, BLOCK_M: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Add a step along K to the sums of both blocks; the second begins SECOND rows further on."""
    weight_row, weight_place, x_row, x_place = operands
    columns = tl.arange(0, BLOCK_M)
    for part in tl.static_range(UNROLL):
        at = k + part
        low_block = weight.load([weight_row, at * 128])
        high_block = weight.load([weight_row + SECOND, at * 128])
        rows = x.load([x_row, at * 128])
        row_scales = tl.load(x_scale + x_place + at.to(tl.int64) * max_rows + columns)
        low_scale = tl.load(weight_scale + weight_place + at)
        high_scale = tl.load(weight_scale + weight_place + SECOND // 128 * GROUPS_K + at)
        low_part = tl.dot(low_block, rows.T)
        high_part = tl.dot(high_block, rows.T)
        low += low_part * (row_scales * low_scale)[None, :]
        high += high_part * (row_scales * high_scale)[None, :]
    return low, high


@triton.jit
def _store_activated(
    gate, up, out, out_scale, place, num_used, max_rows,
    HALF: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Quantise silu(gate) * up of [128, BLOCK_M] numbers into data [L, M, HALF] and its scales."""
    group, first, column = place
    quantized, scales = _quantize_tile(tl.trans(gate * tl.sigmoid(gate) * up))
    rows = first + tl.arange(0, BLOCK_M)
    columns = column * 128 + tl.arange(0, 128)
    wide = (group.to(tl.int64) * max_rows + rows)[:, None] * HALF
    tl.store(out + wide + columns[None, :], quantized, mask=(rows < num_used)[:, None])
    scale_place = (group * (HALF // 128) + column).to(tl.int64) * max_rows
    tl.store(out_scale + scale_place + rows, scales, mask=rows < num_used)


@triton.jit
def _store_plain(
    low, high, out, place, num_used, max_rows,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write two blocks of [BLOCK_N, BLOCK_M] numbers into [L, M, WIDTH]."""
    group, first, column = place
    rows = first + tl.arange(0, BLOCK_M)
    columns = column * (2 * BLOCK_N) + tl.arange(0, BLOCK_N)
    target = out + (group.to(tl.int64) * max_rows + rows)[:, None] * WIDTH + columns[None, :]
    mask = (rows < num_used)[:, None]
    tl.store(target, tl.trans(low).to(tl.bfloat16), mask=mask)
    tl.store(target + BLOCK_N, tl.trans(high).to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["max_rows"])
def stream(
    weight, weight_scale, x, x_scale, counts, out, out_scale, max_rows,
    NUM_GROUPS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    ACTIVATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Multiply rows in use with their expert's weight, on a grid that stays; see `mlp.launch`.

    `weight` and `x` are descriptors of [L * WIDTH, DEPTH] and [L * max_rows, DEPTH] in blocks of
    BLOCK_N and BLOCK_M rows. If ACTIVATE, a weight is a gate over as many rows of `up`.
    """
    GROUPS_K: tl.constexpr = DEPTH // 128
    STEPS: tl.constexpr = GROUPS_K // UNROLL
    TILES_N: tl.constexpr = WIDTH // (2 * BLOCK_N)
    STRIDE: tl.constexpr = BLOCK_N if ACTIVATE else 2 * BLOCK_N
    SECOND: tl.constexpr = WIDTH // 2 if ACTIVATE else BLOCK_N
    if WAITS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, LANES)
    used = tl.load(counts + lanes, mask=lanes < NUM_GROUPS, other=0)
    ends = tl.cumsum((tl.minimum(used, max_rows) + BLOCK_M - 1) // BLOCK_M, axis=0)
    num_mine = (tl.max(ends, axis=0) * TILES_N - program + num_programs - 1) // num_programs
    # Loads run ahead of products: what they need is kept apart from what the result needs, which
    # is found anew when a tile is done.
    weight_row, x_row, weight_place, x_place = 0, 0, 0, tl.zeros((), tl.int64)
    low = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    high = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(0, num_mine * STEPS, num_stages=STAGES):
        k = step % STEPS * UNROLL
        if k == 0:
            tile = _find_tile(ends, program + step // STEPS * num_programs, TILES_N)
            weight_row, weight_place, x_row, x_place = _find_operands(
                tile, max_rows, WIDTH, GROUPS_K, STRIDE, BLOCK_M
            )
        low, high = _multiply(
            low, high, weight, weight_scale, x, x_scale,
            (weight_row, weight_place, x_row, x_place), k, max_rows,
            SECOND, GROUPS_K, BLOCK_M, UNROLL,
        )  # fmt: skip
        if k == GROUPS_K - UNROLL:
            done, done_m, done_n = _find_tile(ends, program + step // STEPS * num_programs, TILES_N)
            place, num_used = (done, done_m * BLOCK_M, done_n), tl.load(counts + done)
            if ACTIVATE:
                _store_activated(
                    low, high, out, out_scale, place, num_used, max_rows, WIDTH // 2, BLOCK_M
                )
            else:
                _store_plain(low, high, out, place, num_used, max_rows, WIDTH, BLOCK_N, BLOCK_M)
            low = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            high = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
