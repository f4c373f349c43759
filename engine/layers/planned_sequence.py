"""One sequence of a step, as attention is planned for it: numbers on the host."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSequence:
    """Some or all of a sequence's queries, and some or all of its positions.

    Attributes:
        index: of the sequence in the step.
        start: its first row in the step.
        num_queries: rows.
        num_positions: that are attended to; the last ones are the queries' own.
        num_blocks: that hold them.
        first_block: of these, in the block table.
    """

    index: int
    start: int
    num_queries: int
    num_positions: int
    num_blocks: int
    first_block: int = 0

    @property
    def rows(self) -> range:
        """Of the step."""
        return range(self.start, self.start + self.num_queries)


def plan_sequences(
    lengths: Iterable[tuple[int, int]], block_size: int
) -> Iterator[PlannedSequence]:
    """Yield the sequences of a step, of which queries and positions are known."""
    start = 0
    for index, (num_queries, num_positions) in enumerate(lengths):
        yield PlannedSequence(
            index=index,
            start=start,
            num_queries=num_queries,
            num_positions=num_positions,
            num_blocks=-(-num_positions // block_size),
        )
        start += num_queries


def as_slice(rows: Sequence[int]) -> slice | None:
    """Return the rows as a slice where they are adjacent (or none), else None."""
    if not rows:
        return slice(0, 0)
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[-1] + 1)
    return None
