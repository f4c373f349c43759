"""One sequence of a step, as attention is planned for it: numbers on the host."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


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


def adjacent_rows(sequences: Sequence[PlannedSequence]) -> slice | None:
    """Return the rows of all sequences as a slice where they are adjacent (or none), else None."""
    if not sequences:
        return slice(0, 0)
    first, end = sequences[0].start, sequences[0].start
    for s in sequences:
        if s.start != end:
            return None
        end += s.num_queries
    return slice(first, end)


def all_rows(sequences: Sequence[PlannedSequence]) -> npt.NDArray[np.int64]:
    """Return the rows of all sequences, [n] int64, in their order."""
    ranges = [np.arange(s.start, s.start + s.num_queries, dtype=np.int64) for s in sequences]
    return np.concatenate(ranges) if ranges else np.zeros(0, dtype=np.int64)
