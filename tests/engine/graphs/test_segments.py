"""Segments hold every query once, at its own position, whatever mix of sequences comes."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.graphs.segments import SegmentShape, queries_of_a_segment

MAX_SEQS, MAX_TOKENS = 5, 40


@st.composite
def steps(draw: st.DrawFn) -> tuple[SegmentShape, list[tuple[int, int]]]:
    lengths: list[tuple[int, int]] = []
    left = draw(st.integers(0, MAX_TOKENS))
    while left and len(lengths) < MAX_SEQS:
        queries = draw(st.integers(1, left))
        lengths.append((queries, queries + draw(st.integers(0, 100))))
        left -= queries
    shape = SegmentShape(
        num_tokens=sum(queries for queries, _ in lengths) + draw(st.integers(0, 9)),
        num_seqs=MAX_SEQS,
        num_queries=draw(st.integers(1, 20)),
    )
    return shape, lengths


def rows_of(lengths: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sequence and the position of each row."""
    return [
        (index, positions - queries + row)
        for index, (queries, positions) in enumerate(lengths)
        for row in range(queries)
    ]


@given(step=steps())
def test_each_row_is_in_one_segment_at_its_position(
    step: tuple[SegmentShape, list[tuple[int, int]]],
) -> None:
    shape, lengths = step
    owners, starts, positions = shape.cut(lengths)
    counts = np.diff(starts)
    assert len(counts) == shape.num_segments
    assert starts[0] == 0
    assert starts[-1] == shape.num_tokens
    assert ((counts >= 0) & (counts <= shape.num_queries)).all()
    assert (positions >= 1).all(), "kernels want no empty sequence"
    found = [
        (owner, seen - count + row)
        for owner, count, seen in zip(owners[:-1], counts, positions[:-1], strict=True)
        for row in range(count)
    ]
    real = rows_of(lengths)
    assert found[: len(real)] == real
    padding = found[len(real) :]
    assert len(padding) == shape.num_tokens - len(real)
    assert all(owner == shape.num_seqs for owner, _ in padding)
    assert [place for _, place in padding] == [
        row % shape.num_queries for row in range(len(padding))
    ]


@given(step=steps())
def test_segments_without_queries_come_last(
    step: tuple[SegmentShape, list[tuple[int, int]]],
) -> None:
    shape, lengths = step
    is_empty = np.diff(shape.cut(lengths)[1]) == 0
    assert (np.sort(is_empty) == is_empty).all()


def test_single_queries_have_a_segment_each_and_none_is_left() -> None:
    shape = SegmentShape(num_tokens=7, num_seqs=3, num_queries=1)
    owners, starts, positions = shape.cut([(2, 9), (1, 4)])
    assert shape.num_segments == 7
    assert owners.tolist()[:7] == [0, 0, 1, 3, 3, 3, 3]
    assert starts.tolist() == list(range(8))
    assert positions.tolist()[:7] == [8, 9, 4, 1, 1, 1, 1]


@pytest.mark.parametrize(("heads", "queries"), [(128, 1), (64, 1), (16, 4), (8, 8), (1, 64)])
def test_a_segment_fills_a_tile(heads: int, queries: int) -> None:
    assert queries_of_a_segment(heads) == queries
