"""Which blocks are copied by one call: runs that are adjacent in the pool and on the host."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from engine.memory.pinned_blocks import adjacent_runs


@given(
    pairs=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12, unique_by=lambda pair: pair[0]
    )
)
def test_runs_cover_every_pair_once_and_in_order(pairs: list[tuple[int, int]]) -> None:
    blocks, places = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    runs = list(adjacent_runs(blocks, places))
    covered = [
        (block + step, place + step) for block, place, length in runs for step in range(length)
    ]
    assert covered == pairs
    for (block, place, length), (next_block, next_place, _) in itertools.pairwise(runs):
        assert (block + length, place + length) != (next_block, next_place)
