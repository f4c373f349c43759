"""How a product of few rows is cut into programs: pure arithmetic, no device.

A weight [N, K] is cut into tiles of `block_n` of its N rows, and K into `num_splits` parts; each
program multiplies one tile's part with all rows of the activation. The key idea: as many programs
as keep every multiprocessor reading, and no more, because parts have to be added up again.
"""

from dataclasses import dataclass
from itertools import product
from typing import Final

from engine.kernels.triton_gemm.limits import DeviceLimits

MAX_ROWS: Final = 128
"""Rows of an activation that one program multiplies with its tile, at most."""

MIN_BLOCK_M: Final = 16
"""The least that rows are rounded up to."""

BLOCK_K: Final = 128
"""Numbers along K of a step: those of one scale."""

BLOCKS_N: Final = (64, 128, 256)
WARPS: Final = (4, 8)
STAGES: Final = (2, 3, 4, 5, 6)
UNROLLS: Final = (1, 2)

MAX_SPLITS: Final = 16
"""More parts than that cost more to add up than their programs save."""

MAX_NUMBERS_PER_THREAD: Final = 64
"""Of a tile; a thread holds them twice, and 128 would spill registers."""

SUMMED_PER_THREAD: Final = 64
"""Numbers that a thread has in flight while it adds up parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one product is cut, and how its programs work.

    Attributes:
        block_n: rows of the weight (columns of the result) of a tile; at least 64, which is what
            the tensor cores take at once.
        num_splits: parts of K.
        num_warps: of a program.
        num_stages: steps along K in flight, the one being multiplied included.
        unroll: steps that are read together, and counted as one above.
        reads_ahead: whether scales are read a step before they are needed, for some registers.
    """

    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int
    unroll: int = 1
    reads_ahead: bool = False

    def num_tiles(self, num_columns: int) -> int:
        """Return the tiles of a weight of so many rows."""
        return -(-num_columns // self.block_n)

    def partial_numbers(self, num_columns: int, num_rows: int) -> int:
        """Return how many float32 wait to be added up."""
        if self.num_splits == 1:
            return 0
        return self.num_tiles(num_columns) * self.num_splits * self.block_n * block_m_of(num_rows)

    def sum_rows(self, num_rows: int) -> int:
        """Return the rows that are added up at a time: a power of two."""
        numbers = SUMMED_PER_THREAD * 32 * self.num_warps
        rows = numbers // (self.block_n * self.num_splits)
        return min(max(1 << max(rows.bit_length() - 1, 0), 1), block_m_of(num_rows))

    def shared_memory(self, num_rows: int) -> int:
        """Return an upper bound of the bytes of shared memory that a program takes."""
        block_m = block_m_of(num_rows)
        operands = self.num_stages * self.unroll * (self.block_n + block_m) * BLOCK_K
        # The tile is turned around on its way out, its rows padded.
        result = 4 * block_m * (self.block_n + 4)
        return max(operands, result) + 2048


def block_m_of(num_rows: int) -> int:
    """Return rows rounded up to a power of two."""
    assert 0 < num_rows <= MAX_ROWS, num_rows
    return max(1 << (num_rows - 1).bit_length(), MIN_BLOCK_M)


def is_legal(cut: Cut, num_rows: int, depth: int, limits: DeviceLimits) -> bool:
    """Return whether the GPU can run the cut for such a product, without spilling registers."""
    numbers = cut.block_n * block_m_of(num_rows) // (32 * cut.num_warps)
    return (
        limits.reads_shared_memory
        and 4 <= numbers <= MAX_NUMBERS_PER_THREAD
        and depth % (BLOCK_K * cut.unroll) == 0
        and 1 <= cut.num_splits <= min(MAX_SPLITS, depth // (BLOCK_K * cut.unroll))
        and cut.shared_memory(num_rows) <= limits.shared_memory
    )


def candidates(
    num_rows: int, num_columns: int, depth: int, limits: DeviceLimits
) -> tuple[Cut, ...]:
    """Return the cuts worth timing: their programs run at once, and there are not too few.

    At least one on a Hopper GPU, none on others.
    """
    cuts = (
        Cut(block_n=n, num_splits=splits, num_warps=warps, num_stages=stages)
        for n, splits, warps, stages in product(BLOCKS_N, range(1, MAX_SPLITS + 1), WARPS, STAGES)
    )
    return tuple(
        cut
        for cut in cuts
        if is_legal(cut, num_rows, depth, limits)
        and _is_useful(cut, num_rows, num_columns, depth, limits)
    )


def _is_useful(cut: Cut, num_rows: int, num_columns: int, depth: int, limits: DeviceLimits) -> bool:
    programs = cut.num_tiles(num_columns) * cut.num_splits
    at_once = limits.num_sms * (limits.shared_memory // cut.shared_memory(num_rows))
    is_alone = cut.num_splits == 1
    fewest = limits.num_sms * 3 // 4
    return (
        (is_alone or programs <= at_once)
        and (programs >= fewest or cut.num_splits == min(MAX_SPLITS, depth // BLOCK_K))
        and cut.num_stages <= max(3, depth // BLOCK_K // cut.num_splits + 1)
    )
