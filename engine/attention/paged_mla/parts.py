"""Which programs attend to which positions: a table of parts, made once a step.

A part is a run of pages (of PAGE positions, whatever a block of the pool holds) through one
sequence after another: it may begin inside one and end inside another. Its row in the table is
that of `schedule_reference.tabulate`: the first and the last sequence, the first page of the
first, the end of the pages of the last, how many pieces of the first come before it, and numbers
that only FlashMLA reads.

A decode step's table is made on the device, from lengths that a replayed graph changes
(`attention`). Where the host knows the lengths it is made here, so that no kernel is compiled for
a number of sequences that comes for the first time.

Legend: S sequences, P parts.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.attention.schedule_reference import count_pages, even_schedule, tabulate

PART_INTS = 8
"""Integers of a part."""

WAVES = 2
"""Programs for every one that the GPU runs at a time, from which on sequences are left whole."""


def count_parts(num_places: int, num_tiles: int) -> int:
    """Return P for sequences that have `num_tiles` tiles of rows each.

    Args:
        num_places: programs that the GPU runs at a time.
        num_tiles: of rows; each runs as a program of its own, for every part.
    """
    return max(1, num_places // max(1, num_tiles))


def parts_on_host(
    lengths: Sequence[tuple[int, int]], tiles: Sequence[int], num_places: int
) -> tuple[npt.NDArray[np.int32], bool]:
    """Return [P, 8] for sequences whose lengths the host knows, and whether any may be cut.

    Args:
        lengths: queries and positions of each of S sequences, S >= 1.
        tiles: of rows, of each.
        num_places: programs that the GPU runs at a time.
    """
    pages = count_pages([positions for _, positions in lengths])
    num_programs = max(1, sum(tiles))
    if num_programs >= WAVES * num_places:
        return _whole(pages), False
    # Pieces are kept for all parts and as many tiles as the largest sequence has: the second
    # bound is that memory's.
    num_parts = min(num_places * len(tiles) // num_programs, 2 * num_places // max(tiles))
    num_parts = max(1, num_parts)
    rows, _ = tabulate(even_schedule(pages, num_parts), num_parts)
    return np.array(rows, dtype=np.int32), num_parts > 1


def _whole(pages: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return a part for each sequence; the longest begin first."""
    order = np.argsort(-np.array(pages), kind="stable")
    table = np.zeros((len(pages), PART_INTS), dtype=np.int32)
    table[:, 0] = table[:, 1] = order
    table[:, 3] = np.array(pages)[order]
    return table
