"""The tiles that a GPU can run for a product, best guess first: pure arithmetic on limits.

The first one is what runs where nothing was measured; the tuner times them all in this order, so
that what little time it is given goes to the likeliest. The key idea: a preferred tile follows from
the shape and the device, and the others are sorted by how far they are from it.
"""

import math
from itertools import product
from typing import Final

from engine.formats.triton_gemm.limits import DeviceLimits
from engine.formats.triton_gemm.tiles import ProductShape, RowLayout, TileConfig

BLOCKS_M: Final = (16, 32, 64, 128)
BLOCKS_N: Final = (32, 64, 128, 256)
BLOCKS_K: Final = (64, 128)
WARPS: Final = (4, 8)
STAGES: Final = (2, 3, 4, 5)
GROUPS_M: Final = (1, 8)

MAX_NUMBERS_PER_THREAD: Final = 64
"""Twice as many registers hold the sums; with 128, compiled code spills on every kind of GPU."""

MIN_NUMBERS_PER_THREAD: Final = {4: 4, 8: 16}
"""By warps: with fewer, warps repeat each other's work, or 4 of them do as well."""

FAR: Final = 4
"""Blocks that differ from the preferred one by more than this factor are not tried."""

EXTRA_SHARED_MEMORY: Final = 1024
"""Bytes beside the operands: scratch of the compiler."""


def candidates(shape: ProductShape, limits: DeviceLimits) -> tuple[TileConfig, ...]:
    """Return every tile worth trying, at least one, sorted by how promising it is."""
    preferred = _preferred(shape, limits)
    tiles = [
        TileConfig(
            block_m=m, block_n=n, block_k=k, num_warps=warps, num_stages=stages, group_m=group
        )
        for m, n, k, warps, stages, group in product(
            BLOCKS_M, BLOCKS_N, BLOCKS_K, WARPS, STAGES, GROUPS_M
        )
    ]
    legal = [tile for tile in tiles if is_legal(tile, limits) and _is_useful(tile, shape)]
    near = [tile for tile in legal if _is_near(tile, preferred)]
    return tuple(sorted(near or legal, key=lambda tile: _distance(tile, preferred)))


def is_legal(tile: TileConfig, limits: DeviceLimits) -> bool:
    """Return whether the GPU can run the tile at all, and without spilling registers."""
    return (
        MIN_NUMBERS_PER_THREAD[tile.num_warps] <= tile.numbers_per_thread <= MAX_NUMBERS_PER_THREAD
        and 128 % tile.block_m == 0
        and 128 % tile.block_k == 0
        and (128 % tile.block_n == 0 or tile.block_n % 128 == 0)
        and shared_memory(tile, limits) <= limits.shared_memory
    )


def shared_memory(tile: TileConfig, limits: DeviceLimits) -> int:
    """Return an upper bound of the bytes of shared memory that a program takes.

    Operands wait there as single bytes, also where they are widened later. Tensor cores that read
    registers need no place for the step that is being multiplied; those of Hopper read shared
    memory, in tiles of at least 64 rows. When all is multiplied the tile itself passes through, in
    bfloat16, rows padded.
    """
    keeps_current = limits.reads_shared_memory and tile.block_m >= 64
    in_flight = tile.num_stages if keeps_current else tile.num_stages - 1
    operands = in_flight * (tile.block_m + tile.block_n) * tile.block_k
    result = 2 * tile.block_m * (tile.block_n + 8)
    return max(operands, result) + EXTRA_SHARED_MEMORY


def _is_useful(tile: TileConfig, shape: ProductShape) -> bool:
    """Whether nothing of the tile is idle by construction."""
    # One tile of 128 rows per block is one pass over the weight; more only repeat the reading.
    tiles_m = 128 if shape.layout is RowLayout.ALIGNED else _power_of_two(shape.num_rows)
    smallest = 64 if shape.layout is RowLayout.ALIGNED else 16
    return (
        smallest <= tile.block_m <= max(tiles_m, 16)
        and tile.block_n <= max(_power_of_two(shape.num_columns), BLOCKS_N[0])
        and tile.num_stages <= max(2, shape.depth // tile.block_k)
        and (tile.group_m == 1 or shape.num_rows > tile.block_m)
    )


def _is_near(tile: TileConfig, preferred: TileConfig) -> bool:
    return all(
        preferred_block <= FAR * block and block <= FAR * preferred_block
        for block, preferred_block in (
            (tile.block_m, preferred.block_m),
            (tile.block_n, preferred.block_n),
        )
    )


def _preferred(shape: ProductShape, limits: DeviceLimits) -> TileConfig:
    """Return the tile to start from; it need not be legal."""
    is_aligned = shape.layout is RowLayout.ALIGNED
    block_m = 128 if is_aligned else min(max(_power_of_two(shape.num_rows), 16), 128)
    num_m = -(-shape.num_rows // block_m)
    if shape.layout is RowLayout.MASKED:
        num_m *= shape.num_experts
    # Narrower while there would be idle SMs.
    block_n = 128
    while block_n > 32 and num_m * -(-shape.num_columns // block_n) < limits.num_sms:
        block_n //= 2
    return TileConfig(
        block_m=block_m,
        block_n=block_n,
        # Widened operands take twice the registers.
        block_k=128 if limits.has_fp8 else 64,
        num_warps=8 if block_m * block_n > 64 * 128 else 4,
        num_stages=4,
        group_m=8 if num_m > 1 else 1,
    )


def _distance(tile: TileConfig, preferred: TileConfig) -> tuple[float, ...]:
    """Sum the factors between them as powers of two, what matters little weighing less."""

    def steps(a: int, b: int) -> float:
        return abs(math.log2(a / b))

    apart = (
        steps(tile.block_m, preferred.block_m)
        + steps(tile.block_n, preferred.block_n)
        + steps(tile.block_k, preferred.block_k)
        + steps(tile.num_warps, preferred.num_warps)
        + abs(tile.num_stages - preferred.num_stages) / 2
        + (tile.group_m != preferred.group_m)
    )
    # Ties in a fixed order, wider tiles first.
    return apart, -tile.block_m, -tile.block_n, -tile.block_k, tile.num_warps, -tile.num_stages


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()
