"""Every pair that is possible occurs, whatever the seed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.matrix.cells import IMPOSSIBLE, make_cells, pairs_in, possible_cells

pytestmark = pytest.mark.hypothesis


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.integers(0, 250))
def test_every_possible_pair_occurs_once_at_least_and_no_cell_twice(seed: int, count: int) -> None:
    cells = make_cells(seed, count)
    assert pairs_in(cells) == pairs_in(possible_cells())
    assert max(Counter(cells).values()) == 1
    assert all(cell.is_possible for cell in cells)
    assert len(cells) >= count
    assert cells == make_cells(seed, count)


def test_other_seeds_give_other_cells_and_a_longer_series_begins_like_a_shorter_one() -> None:
    assert make_cells(1) != make_cells(2)
    assert make_cells(1, 200)[: len(make_cells(1))] == make_cells(1)
    assert len(make_cells(1, 200)) == 200


def test_each_rule_leaves_something_out() -> None:
    for rule in IMPOSSIBLE:
        assert rule.why
        assert not any(
            cell.fault in rule.faults
            and cell.moment in rule.moments
            and cell.feature in rule.features
            for cell in possible_cells()
        )
