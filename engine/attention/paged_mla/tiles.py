"""How paged attention is cut into programs, by kind of GPU, storage, and rows of a sequence.

A tile of rows is read once and stays; tiles of positions stream by, several on their way at a
time. The sums, [rows, 512] in float32, fill half of the registers of eight warps at 64 rows, which
is what Hopper's tensor cores want; its shared memory then holds the queries and two tiles of 64
positions. Other tensor cores read operands from registers, and make do with fewer rows. What is
here was chosen by arithmetic and by what the compiler says (registers, shared memory); the first
tile of a kind is the one that runs.
"""

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from engine.formats.triton_gemm.limits import RESERVED_SHARED_MEMORY, DeviceLimits

WIDE_ROWS: Final = 64
"""From which on Hopper's tensor cores read shared memory."""

HOPPER_SHARED_MEMORY: Final = 222_248
"""Bytes that the kernels for Hopper take, as Triton 3.6 and 3.8 compile them, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """What the choice depends on of a layer of a pool.

    Attributes:
        latent_dim: C + R.
        block_size: positions of a block.
        is_fp8: whether latents are in e4m3.
    """

    latent_dim: int
    block_size: int
    is_fp8: bool

    @classmethod
    def of(cls, cache: Tensor) -> "PoolShape":
        """Read it off a layer [num_blocks, block_size, L]."""
        _, block_size, latent_dim = cache.shape
        is_fp8 = cache.dtype.itemsize == 1
        return cls(latent_dim=latent_dim, block_size=block_size, is_fp8=is_fp8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedTile:
    """How a program works.

    Attributes:
        block_m: rows (heads of new tokens) of a program, a power of two of at least 16.
        block_n: positions of a step, a power of two of at least 16.
        num_warps: of a program.
        num_stages: steps in flight, the one being multiplied included.
        per_sm: programs that share an SM.
        is_hopper: whether the kernels for Hopper run it (`hopper_kernel`), of which there is one
            tile.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int = 1
    is_hopper: bool = False


HOPPER_TILE: Final = PagedTile(block_m=64, block_n=64, num_warps=8, num_stages=2, is_hopper=True)


def shared_memory(tile: PagedTile, limits: DeviceLimits, pool: PoolShape) -> int:
    """Return an upper bound of the bytes of shared memory that a program takes."""
    if tile.is_hopper:
        return HOPPER_SHARED_MEMORY
    queries = 2 * tile.block_m * pool.latent_dim
    step = tile.block_n * pool.latent_dim
    is_wide = limits.reads_shared_memory and tile.block_m >= WIDE_ROWS
    # Where tensor cores read registers, a step has left its buffer before it is multiplied.
    buffers = tile.num_stages if is_wide else max(1, tile.num_stages - 1)
    widened = 2 * step if pool.is_fp8 else 0
    # Probabilities, and what crosses warps.
    exchange = 0 if is_wide else 2 * tile.block_m * (tile.block_n + 8) + 1024
    return queries + buffers * step * (1 if pool.is_fp8 else 2) + widened + exchange


def is_legal(tile: PagedTile, limits: DeviceLimits, pool: PoolShape) -> bool:
    """Return whether the GPU can run as many programs as the tile says."""
    if tile.is_hopper and not (
        limits.sm == 90 and pool.latent_dim == 576 and pool.block_size % tile.block_n == 0
    ):
        return False
    room = limits.shared_memory + RESERVED_SHARED_MEMORY
    taken = shared_memory(tile, limits, pool)
    return tile.per_sm * (taken + RESERVED_SHARED_MEMORY) <= room


def candidates(limits: DeviceLimits, num_rows: int, pool: PoolShape) -> list[PagedTile]:
    """Return the tiles to choose from, the best guess first; at least one.

    Args:
        limits: of the GPU.
        num_rows: of a sequence, heads times new tokens.
        pool: that is read.
    """
    few = num_rows <= 16
    if limits.reads_shared_memory and not few:
        tiles = [HOPPER_TILE, _tile(64, 64, 8, 2), _tile(64, 32, 8, 3), _tile(64, 64, 8, 1)]
    elif few:
        tiles = [_tile(16, 64, 8, 3), _tile(16, 32, 4, 3), _tile(16, 32, 8, 3), HOPPER_TILE]
    else:
        tiles = [_tile(32, 32, 8, 3), _tile(32, 16, 8, 3), _tile(16, 32, 8, 3), _tile(32, 32, 8, 2)]
    tiles.append(_tile(16, 16, 4, 2))
    legal = [tile for tile in tiles if is_legal(tile, limits, pool)]
    return legal or tiles[-1:]


def _tile(block_m: int, block_n: int, num_warps: int, num_stages: int) -> PagedTile:
    return PagedTile(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
