"""Every layer has a map of its own, and maps that may change keep their memory and shape."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.experts.placement import placement_map
from engine.experts.placements import ExpertPlacements

ROWS = st.lists(st.integers(0, 5), min_size=4, max_size=4).flatmap(
    lambda extra: st.permutations([*range(6), *extra])
)


@given(table=st.lists(ROWS, min_size=1, max_size=4), data=st.data())
def test_layers_map_each_to_its_own_slots(table: list[list[int]], data: st.DataObject) -> None:
    placements = ExpertPlacements(table, 6, first_layer=3)
    ids = torch.tensor([data.draw(st.permutations(range(6))), [-1] * 6])
    for layer, row in enumerate(table, 3):
        physical = placements.of_layer(layer).to_physical(ids)
        assert torch.tensor(row)[physical[0]].equal(ids[0])
        assert physical[1].eq(-1).all()
    assert placements.table == tuple(map(tuple, table))


@given(before=ROWS, after=ROWS)
def test_maps_that_may_change_have_room_for_every_placement(
    before: list[int], after: list[int]
) -> None:
    placements = ExpertPlacements([before, after], 6, can_change=True)
    address = placements.maps.data_ptr()
    moved = placements.of_layer(0)
    placements.maps[0].copy_(placement_map(after, 6, placements.width))
    moved.moved_to(after)
    ids = torch.arange(6).repeat(4, 1)
    assert moved.to_physical(ids).equal(placements.of_layer(1).to_physical(ids))
    assert torch.tensor(after)[moved.to_physical(ids)].equal(ids)
    assert placements.maps.data_ptr() == address


def test_an_identity_that_may_change_is_read_from_the_device() -> None:
    ids = torch.tensor([[3, 1, -1]])
    fixed = ExpertPlacements.alike(range(4), 4, layers=range(2, 4)).of_layer(2)
    assert fixed.to_physical(ids) is ids
    placements = ExpertPlacements.alike(range(4), 4, layers=range(2, 4), can_change=True)
    placement = placements.of_layer(3)
    assert placement.to_physical(ids).equal(ids)
    placements.maps[1].copy_(placement_map([1, 0, 3, 2], 4, 1))
    assert placement.to_physical(ids).tolist() == [[2, 0, -1]], "as a captured step would"
    with pytest.raises(AssertionError):
        fixed.moved_to([1, 0, 3, 2])


def test_tables_that_are_none() -> None:
    with pytest.raises(ValueError, match="not equally many"):
        ExpertPlacements([[0, 1], [0, 1, 1]], 2)
    with pytest.raises(ValueError, match=r"experts \[0\] have more than 1 slots"):
        placement_map([0, 0, 1], 2, 1)
    assert ExpertPlacements([], 0).num_physical_experts == 0
