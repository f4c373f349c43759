"""The shape of a product of FP8 rows and block-quantised weights, and how it is cut into tiles."""

from dataclasses import dataclass
from enum import StrEnum


class RowLayout(StrEnum):
    """How rows find their weight."""

    PLAIN = "plain"
    """One weight for all rows."""
    ALIGNED = "aligned"
    """One expert for each block of 128 rows; see `engine.kernels.alignment`."""
    MASKED = "masked"
    """A run of rows for each expert, of which the first so many are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """[M, K] times [N, K], or times one of several such weights.

    Attributes:
        layout: of the rows.
        num_rows: M; all rows of the aligned layout, the expected rows of one expert if masked.
        num_columns: N.
        depth: K, a multiple of 128.
        num_experts: weights, 1 where the layout is plain.
    """

    layout: RowLayout
    num_rows: int
    num_columns: int
    depth: int
    num_experts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """How one program of the kernel works.

    Attributes:
        block_m: rows of a tile, a power of two that divides 128, at least 16.
        block_n: columns of a tile, a power of two; 256 spans two blocks of the weight's scales.
        block_k: numbers along K that are multiplied at once; divides 128.
        num_warps: of a program.
        num_stages: steps along K in flight, the one being multiplied included.
        group_m: tiles below each other that run before the next column of tiles.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int

    @property
    def numbers_per_thread(self) -> int:
        """Of the tile's result; a thread holds them twice: the sum, and the part to be scaled."""
        return self.block_m * self.block_n // (32 * self.num_warps)
