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

ALONE = tl.constexpr(0)
"""Launched as usual: everything before has ended."""
WAITS = tl.constexpr(1)
"""Launched as a dependent kernel (see `engine.kernels.fused.dependent`)."""
ASKS = tl.constexpr(2)
"""Likewise, and `counts` are older than the kernel before, so that weights can be asked for."""

AHEAD = tl.constexpr(1024)
"""Bytes of each row of a weight that are asked for while the kernel before still runs."""

_ASK = tl.constexpr(
    "{ .reg .b64 a; cvta.to.global.u64 a, $1;"
    " cp.async.bulk.prefetch.L2.global [a], $2; mov.u32 $0, 0; }"
)


@triton.jit
def _find_tile(ends, tile, TILES_N: tl.constexpr):
    """Return the group, the tile of its rows, and the tile of columns; past the end: no group's."""
    slot = tile // TILES_N
    is_before = ends <= slot
    group = tl.sum(is_before.to(tl.int32), axis=0)
    first = tl.max(tl.where(is_before, ends, 0), axis=0)
    return group, slot - first, tile % TILES_N


@triton.jit
def _ask(numbers, row, DEPTH: tl.constexpr, ROWS: tl.constexpr):
    """Bring the beginnings of rows of the weight into the cache, and do not wait for them."""
    rows = row.to(tl.int64) + tl.arange(0, ROWS)
    sizes = tl.zeros([ROWS], tl.int32) + AHEAD
    tl.inline_asm_elementwise(
        _ASK, "=r,l,r", [(numbers + rows * DEPTH).to(tl.int64), sizes],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


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
    weight, numbers, weight_scale, x, x_scale, counts, out, out_scale, max_rows,
    NUM_GROUPS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    ACTIVATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """Multiply rows in use with their expert's weight, on a grid that stays.

    Args:
        weight: descriptor of [L * WIDTH, DEPTH] e4m3 in blocks of [BLOCK_N, 128].
        numbers: where the weight begins.
        weight_scale: [L, WIDTH / 128, DEPTH / 128] float32.
        x: descriptor of [L * M, DEPTH] e4m3 in blocks of [BLOCK_M, 128].
        x_scale: float32, number (l, m, g) at (l * DEPTH / 128 + g) * M + m.
        counts: [L] int32, rows in use.
        out: [L, M, WIDTH] bfloat16; if ACTIVATE [L, M, WIDTH / 2] e4m3.
        out_scale: if ACTIVATE, as x_scale.
        max_rows: M, a multiple of BLOCK_M.
        NUM_GROUPS: L.
        LANES: a power of two, at least L.
        WIDTH: rows of an expert's weight, a multiple of 256.
        DEPTH: columns of the weight, a multiple of 128 * UNROLL.
        ACTIVATE: whether the weight is a gate over as many rows of `up`; BLOCK_N is 128 then.
        BLOCK_M: rows of x in a tile.
        BLOCK_N: rows of the weight in each of the tile's two blocks.
        UNROLL: groups of 128 along K in a step.
        STAGES: steps in flight.
        START: one of `ALONE`, `WAITS` and `ASKS`.
    """
    GROUPS_K: tl.constexpr = DEPTH // 128
    STEPS: tl.constexpr = GROUPS_K // UNROLL
    TILES_N: tl.constexpr = WIDTH // (2 * BLOCK_N)
    STRIDE: tl.constexpr = BLOCK_N if ACTIVATE else 2 * BLOCK_N
    SECOND: tl.constexpr = WIDTH // 2 if ACTIVATE else BLOCK_N
    if START == WAITS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    lanes = tl.arange(0, LANES)
    used = tl.load(counts + lanes, mask=lanes < NUM_GROUPS, other=0)
    ends = tl.cumsum((tl.minimum(used, max_rows) + BLOCK_M - 1) // BLOCK_M, axis=0)
    num_tiles = tl.max(ends, axis=0) * TILES_N
    num_mine = (num_tiles - program + num_programs - 1) // num_programs
    if START == ASKS:
        if num_mine > 0:
            group, tile_m, column = _find_tile(ends, program, TILES_N)
            _ask(numbers, group * WIDTH + column * STRIDE, DEPTH, 2 * BLOCK_N)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # Loads run ahead of products: what they need is kept apart from what the result needs, which
    # is found anew when a tile is done.
    weight_row, x_row, weight_place, x_place = 0, 0, 0, tl.zeros((), tl.int64)
    columns = tl.arange(0, BLOCK_M)
    low = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    high = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(0, num_mine * STEPS, num_stages=STAGES):
        k = step % STEPS * UNROLL
        if k == 0:
            group, tile_m, column = _find_tile(
                ends, program + step // STEPS * num_programs, TILES_N
            )
            weight_row = group * WIDTH + column * STRIDE
            weight_place = (group * (WIDTH // 128) + column * STRIDE // 128) * GROUPS_K
            x_row = group * max_rows + tile_m * BLOCK_M
            x_place = (group * GROUPS_K).to(tl.int64) * max_rows + tile_m * BLOCK_M
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
        if k == GROUPS_K - UNROLL:
            done, done_m, done_n = _find_tile(ends, program + step // STEPS * num_programs, TILES_N)
            place = done, done_m * BLOCK_M, done_n
            num_used = tl.load(counts + done)
            if ACTIVATE:
                _store_activated(
                    low, high, out, out_scale, place, num_used, max_rows, WIDTH // 2, BLOCK_M
                )
            else:
                _store_plain(low, high, out, place, num_used, max_rows, WIDTH, BLOCK_N, BLOCK_M)
            low = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            high = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
