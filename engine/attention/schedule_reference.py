"""How a decode step's contexts are cut into parts that the GPU attends to side by side.

FlashMLA runs a fixed number of parts, and a part goes through a run of pages: the end of one
sequence, whole ones, the beginning of another. Its own schedule fills all parts up to the same
capacity, which is chosen so that it suffices whatever the lengths are; often a smaller one does.
The key idea: the step takes as long as its fullest part, so try all capacities that can be best,
with sequences cut and with whole ones, and take what costs least. A sequence that is cut has to be
put together afterwards, and that has a price. This is the plain version, one part after the other;
`fused.schedule` computes the same on the device. It knows nothing of how tables are handed over.

Legend: S sequences, P parts. All costs are in pages: a part's time to attend to one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PAGE = 64
"""Positions of a page."""

OVERHEAD = 5
"""What beginning and ending a piece costs, as the library reckons: an estimate, in pages."""

MAX_SPARE = 15
"""How far capacities are tried above the least that total work allows; at least OVERHEAD."""

QUARTERS = 4
CUT_COST, PIECE_COST = 8, 1
"""Quarters of a page: for cutting anything, and for every piece of the sequence with the most."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages [begin, end) of a sequence, the `index`-th piece of it."""

    sequence: int
    begin: int
    end: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What every part does.

    Attributes:
        capacity: no part costs more.
        parts: pieces of each part, in order; at most P, none of them empty.
        num_pieces: of each sequence, [S].
    """

    capacity: int
    parts: list[list[Piece]]
    num_pieces: list[int]

    @property
    def cost(self) -> int:
        """Return what is compared, in quarters of a page."""
        most = max(self.num_pieces)
        return self.capacity * QUARTERS + most * PIECE_COST + (CUT_COST if most > 1 else 0)


def count_pages(seq_lens: Sequence[int]) -> list[int]:
    """Return the pages of each sequence; one without positions occupies one as well."""
    return [max(-(-length // PAGE), 1) for length in seq_lens]


def fill(pages: Sequence[int], capacity: int, *, cuts: bool, overhead: int = OVERHEAD) -> Schedule:
    """Fill parts in order, each as far as `capacity` allows.

    Args:
        pages: of each sequence.
        capacity: of a part, `overhead` for each of its pieces included; more than `overhead`.
        cuts: whether a sequence that does not fit may begin in the room that is left.
        overhead: of a piece.

    Raises:
        ValueError: without cuts, a sequence is longer than a part.
    """
    parts: list[list[Piece]] = [[]]
    room, num_pieces = capacity, []
    for sequence, count in enumerate(pages):
        begin = index = 0
        while begin < count:
            size = count - begin
            if size + overhead > room:
                size = room - overhead if cuts else 0
            if size > 0:
                parts[-1].append(Piece(sequence, begin, begin + size, index))
                begin, index, room = begin + size, index + 1, room - size - overhead
            elif room == capacity:
                raise ValueError(f"sequence {sequence}: {count} pages in parts of {capacity}")
            if begin < count:
                parts.append([])
                room = capacity
        num_pieces.append(index)
    return Schedule(capacity=capacity, parts=parts, num_pieces=num_pieces)


def least_capacity(pages: Sequence[int], num_parts: int, overhead: int = OVERHEAD) -> int:
    """Return a bound: the work is no less than this per part, and a part has room for a page."""
    total = sum(pages) + overhead * len(pages)
    return max(-(-total // num_parts), overhead + 1)


def even_schedule(pages: Sequence[int], num_parts: int, overhead: int = OVERHEAD) -> Schedule:
    """Return the library's own: the capacity that always suffices."""
    total = sum(pages) + overhead * len(pages)
    return fill(pages, -(-total // num_parts) + overhead, cuts=True, overhead=overhead)


def best_schedule(pages: Sequence[int], num_parts: int, overhead: int = OVERHEAD) -> Schedule:
    """Return the cheapest among all capacities near the bound; among equals, cuts come last.

    With cuts, a capacity of the bound and the overhead always suffices: no part but the last
    wastes more than that.
    """
    bound = least_capacity(pages, num_parts, overhead)
    found = []
    for cuts in (False, True):
        for capacity in range(bound, bound + MAX_SPARE + 1):
            if cuts or capacity >= max(pages) + overhead:
                schedule = fill(pages, capacity, cuts=cuts, overhead=overhead)
                if len(schedule.parts) <= num_parts:
                    found.append(schedule)
    return min(found, key=lambda schedule: schedule.cost)


def tabulate(schedule: Schedule, num_parts: int) -> tuple[list[list[int]], list[int]]:
    """Return rows of parts [P, 8] and running sums of pieces [S + 1], as the kernel reads them.

    A row is: the first and the last sequence, the first page of the first and the end of the pages
    of the last, which piece the first is, whether the first and the last are cut, and a filler.
    A part without work begins behind the last sequence.
    """
    num_pieces, pages_of = schedule.num_pieces, {}
    rows = []
    for part in schedule.parts:
        first, last = part[0], part[-1]
        is_cut = [int(num_pieces[piece.sequence] > 1) for piece in (first, last)]
        rows.append([first.sequence, last.sequence, first.begin, last.end, first.index, *is_cut, 0])
        pages_of[last.sequence] = last.end
    num_seqs = len(num_pieces)
    idle = [num_seqs, num_seqs - 1, 0, pages_of[num_seqs - 1], 0, 0, 0, 0]
    rows += [idle] * (num_parts - len(rows))
    sums = [0]
    for count in num_pieces:
        sums.append(sums[-1] + count)
    return rows, sums
