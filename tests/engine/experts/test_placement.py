"""The maps are inverse to each other, and replicas share the tokens of their expert."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.experts.placement import ExpertPlacement, placement_map

SLOTS = st.lists(st.integers(0, 5), max_size=10).flatmap(
    lambda extra: st.permutations([*range(6), *extra])
)


@given(slots=SLOTS, data=st.data())
def test_physical_slots_hold_the_logical_expert(slots: list[int], data: st.DataObject) -> None:
    placement = ExpertPlacement.from_physical(slots, 6)
    ids = torch.tensor(
        data.draw(st.lists(st.permutations(range(6)), min_size=1, max_size=8)), dtype=torch.int64
    )[:, :3]
    physical = placement.to_physical(ids)
    assert torch.tensor(slots)[physical].equal(ids)
    assert placement.logical_replica_count.sum() == placement.num_physical_experts == len(slots)


def test_replicas_share_tokens() -> None:
    placement = ExpertPlacement.from_physical([0, 1, 0, 0], 2)
    physical = placement.to_physical(torch.zeros(9, 1, dtype=torch.int64)).flatten()
    assert physical.bincount().tolist() == [3, 0, 3, 3]


@given(slots=SLOTS)
def test_no_expert_is_in_no_slot(slots: list[int]) -> None:
    for placement in (ExpertPlacement.from_physical(slots, 6), ExpertPlacement.identity(6)):
        ids = torch.tensor([[5, 0], [-1, -1], [3, -1]])
        assert placement.to_physical(ids).lt(0).equal(ids < 0)
        assert placement.logical_replica_count.min() >= 1
        assert len(placement.logical_replica_count) == 6


def test_identity() -> None:
    placement = ExpertPlacement.identity(4)
    ids = torch.tensor([[3, 1]])
    assert placement.is_identity
    assert placement.to_physical(ids) is ids
    assert not ExpertPlacement.from_physical([1, 0], 2).is_identity


@given(slots=st.permutations(range(6)))
def test_where_experts_move_but_have_no_copies(slots: list[int]) -> None:
    maps = placement_map(slots, 6, 1)
    placement = ExpertPlacement(slots, maps, can_change=True)
    ids = torch.tensor([[5, 0], [-1, -1], [3, -1]])
    physical = placement.to_physical(ids)
    assert physical.lt(0).equal(ids < 0)
    assert torch.tensor(slots)[physical[ids >= 0]].equal(ids[ids >= 0])
    maps.copy_(placement_map(range(6), 6, 1))
    assert placement.to_physical(ids).equal(ids), "the map is read anew at every step"


@pytest.mark.parametrize(("slots", "message"), [([0, 2], "expert 2"), ([0, 0], r"\[1\]")])
def test_impossible_placements(slots: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertPlacement.from_physical(slots, 2)
