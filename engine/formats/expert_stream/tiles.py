"""How a streamed product is cut, and which cut is for how many rows: pure arithmetic and a table.

A tile has two blocks of a weight's rows and one of activations; see `kernel`. What bounds the
choice is shared memory: what does not hold steps in flight is wasted, and memory needs about 32 KiB
on their way to each SM to be busy.
"""

from dataclasses import dataclass
from typing import Final

from engine.formats.fp8_rows import GROUP
from engine.formats.triton_gemm.limits import RESERVED_SHARED_MEMORY, DeviceLimits

MAX_NUMBERS_PER_THREAD: Final = 64
"""Of both blocks' sums; a thread holds them twice, and with more compiled code spills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTile:
    """How the programs of a product work.

    Attributes:
        block_m: activations of a tile, a power of two of at least 16 that divides 128.
        block_n: rows of each of its two blocks of the weight, 64 or 128.
        unroll: groups of 128 along K that are one step.
        num_warps: of a program.
        num_stages: steps in flight, the one being multiplied included.
        per_sm: programs that share an SM.
    """

    block_m: int
    block_n: int = GROUP
    unroll: int = 1
    num_warps: int = 4
    num_stages: int
    per_sm: int = 1

    @property
    def numbers_per_thread(self) -> int:
        """Sums of both blocks that a thread holds."""
        return 2 * self.block_m * self.block_n // (32 * self.num_warps)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTiles:
    """The cuts of the two products of an MLP.

    Attributes:
        rows: most rows of an expert, as expected, that they are for.
        gated: of the product with gate and up, whose blocks have 128 rows.
        down: of the other one.
    """

    rows: int
    gated: StreamTile
    down: StreamTile


def shared_memory(tile: StreamTile) -> int:
    """Return an upper bound of the bytes of shared memory that a program takes."""
    step = tile.unroll * (2 * tile.block_n + tile.block_m) * GROUP
    scales = tile.unroll * 4 * (tile.block_m + 2)
    # A finished block passes through, in bfloat16, rows padded.
    result = 2 * tile.block_m * (tile.block_n + 8)
    return tile.num_stages * (step + scales) + result + 512


def is_legal(tile: StreamTile, limits: DeviceLimits) -> bool:
    """Return whether the GPU can run as many programs as the tile says, without spilling."""
    room = limits.shared_memory + RESERVED_SHARED_MEMORY
    return (
        limits.sm == 90
        and tile.block_n % (16 * tile.num_warps) == 0
        and tile.numbers_per_thread <= MAX_NUMBERS_PER_THREAD
        and tile.per_sm * (shared_memory(tile) + RESERVED_SHARED_MEMORY) <= room
    )


def refusal(tile: StreamTile, max_rows: int, width: int, depth: int, *, is_gated: bool) -> str:
    """Return why a product of [M, K] rows and an [N, K] weight cannot be cut so; empty if it can.

    Args:
        tile: how it would be cut.
        max_rows: M, of an expert.
        width: N.
        depth: K.
        is_gated: whether the weight is a gate over as many rows of `up`, which are quantised
            together: blocks of 128 of them, of each half.
    """
    steps = {
        "rows of an expert": (max_rows, tile.block_m),
        "rows of the weight": (width, 2 * (GROUP if is_gated else tile.block_n)),
        "depth": (depth, GROUP * tile.unroll),
    }
    for name, (size, step) in steps.items():
        if size % step:
            return f"{name}: {size} is no multiple of {step}"
    if is_gated and tile.block_n != GROUP:
        return f"blocks of {tile.block_n} rows: gated ones have {GROUP}"
    return ""


def choose_tiles(table: tuple[StreamTiles, ...], expected_rows: int) -> StreamTiles | None:
    """Return the cuts for so many rows of an expert, None if the table has none for as many."""
    return next((tiles for tiles in table if expected_rows <= tiles.rows), None)


MEASURED: Final = (
    StreamTiles(
        rows=16,
        gated=StreamTile(block_m=32, unroll=2, num_warps=8, num_stages=3),
        down=StreamTile(block_m=32, unroll=2, num_warps=8, num_stages=3),
    ),
)
"""Fewest rows first, as they were fastest on one H200 for 32 experts of 7168 by 2048.

An MLP took 340 us at 16 rows, where DeepGEMM and the activation took 370. With 32 rows both took
368, with 64 streams took longer. Up to 8 rows, tiles of 16 were 1 % faster; but an expert that gets
more than 16 then costs more than that, and routing is never even.
"""
