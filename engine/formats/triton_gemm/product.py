"""The matrix product itself, in Triton: one kernel for plain, aligned and masked rows.

A program makes one tile of the result. Along K it multiplies up to 128 numbers in FP8 and adds the
partial sum, times both scales, to a float32 tile, as the scales of rows and weights change every
128 numbers. GPUs without FP8 tensor cores get the same numbers as float16: the bits of an e4m3
number, moved by seven places, are a float16 of 1/256 of its value, subnormals included, so widening
costs three integer operations and is exact. (The pattern of e4m3's NaN reads as 480 there; whoever
quantises leaves a NaN in the scale instead.)

This module is compiled by Triton and is imported only where that is installed.
"""

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
ALIGNED = tl.constexpr(1)
MASKED = tl.constexpr(2)


@triton.jit
def _widen(bits):
    """Return float16 numbers of 1/256 of the e4m3 numbers with these bits."""
    wide = bits.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _place_tile(num_m, num_n, group_m):
    """Return the tile of this program: `group_m` tiles below each other, then the next column."""
    program = tl.program_id(0)
    per_group = group_m * num_n
    first = program // per_group * group_m
    height = tl.minimum(num_m - first, group_m)
    inside = program % per_group
    return first + inside % height, inside // height


@triton.jit
def _find_expert(experts, group, first, LAYOUT: tl.constexpr):
    """Return the expert of a tile of rows, -1 if none of them is in use."""
    if LAYOUT == ALIGNED:
        return tl.load(experts + first).to(tl.int64)
    if LAYOUT == MASKED:
        return tl.where(first < tl.load(experts + group), group, -1).to(tl.int64)
    return group.to(tl.int64)


# Values that come in all sizes: the code must not be compiled anew where one is divisible by 16.
@triton.jit(do_not_specialize=["num_rows", "num_groups", "scale_group", "scale_column", "group_m"])
def multiply(
    a, a_scale, b, b_scale, out, experts,
    num_rows, num_groups, num_columns, depth,
    a_group, a_row, scale_group, scale_row, scale_column, group_m,
    LAYOUT: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write out[M, N] = a[M, K] x b[expert, N, K].

    `experts` holds: PLAIN nothing; ALIGNED [M] the expert of each row, equal inside 128, or -1;
    MASKED [num_groups] the used rows of each group of `num_rows` rows, group g being expert g's.
    """
    tiles_per_group = tl.cdiv(num_rows, BLOCK_M)
    tile_m, tile_n = _place_tile(
        tiles_per_group * num_groups, tl.cdiv(num_columns, BLOCK_N), group_m
    )
    group = tile_m // tiles_per_group
    first = tile_m % tiles_per_group * BLOCK_M
    expert = _find_expert(experts, group, first, LAYOUT)
    if LAYOUT != PLAIN and expert < 0:
        return

    # Rows and columns past the end read the last one, and are not stored.
    row = tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    near_row = tl.minimum(row, num_rows - 1 - first)
    near_column = tl.minimum(column, num_columns - 1)
    k = tl.arange(0, BLOCK_K)
    groups_of_k = depth // 128
    group, wide_first = group.to(tl.int64), first.to(tl.int64)
    a += group * a_group + wide_first * a_row
    a_tile = a + near_row[:, None] * a_row + k[None, :]
    b_tile = b + (expert * num_columns + near_column[None, :]) * depth + k[:, None]
    a_scale += group * scale_group + wide_first * scale_row
    a_scales = a_scale + near_row * scale_row
    b_scales = b_scale + expert * tl.cdiv(num_columns, 128) * groups_of_k
    if BLOCK_N <= 128:
        b_scales += tile_n * BLOCK_N // 128 * groups_of_k
    else:
        b_scales += near_column // 128 * groups_of_k

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, depth // BLOCK_K):
        x = tl.load(a_tile)
        y = tl.load(b_tile)
        x_scale = tl.load(a_scales + step * BLOCK_K // 128 * scale_column)
        y_scale = tl.load(b_scales + step * BLOCK_K // 128)
        part = tl.dot(_widen(x), _widen(y)) if WIDEN else tl.dot(x, y)
        if BLOCK_N <= 128:
            total += part * (x_scale * y_scale)[:, None]
        else:
            total += part * x_scale[:, None] * y_scale[None, :]
        a_tile += BLOCK_K
        b_tile += BLOCK_K
    if WIDEN:
        total *= 65536.0  # of both factors' 256

    place = (group * num_rows + wide_first + row)[:, None] * num_columns + column[None, :]
    mask = (first + row < num_rows)[:, None] & (column < num_columns)[None, :]
    tl.store(out + place, total.to(tl.bfloat16), mask=mask)
