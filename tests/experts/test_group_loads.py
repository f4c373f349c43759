"""Loads of groups on ranks are those of the slots, and exchanges are judged by them."""

import numpy as np

from experts.balance import replicate_hot
from experts.group_loads import GroupLoads
from experts.plan import plan_placement
from experts.rearrange import rearrange
from experts.time_model import TimeModel
from tests.experts.expert_load import even, skewed_trace


def of(placement_LP: np.ndarray, loads_LE: np.ndarray) -> GroupLoads:
    loads_LP = np.take_along_axis(loads_LE, placement_LP, axis=1)
    return GroupLoads(placement_LP, loads_LP, num_ranks=4, num_groups=4, num_experts=16)


def test_an_exchange_leaves_the_sums_of_the_placement_behind_it() -> None:
    generator = np.random.default_rng(0)
    loads_LE = generator.random((2, 16))
    placement_LP = np.stack([generator.permutation(16) for _ in range(2)])
    groups = of(placement_LP, loads_LE)
    layers, one, other = np.array([0, 1]), np.array([0, 2]), np.array([3, 1])
    goers, comers = placement_LP[layers, one * 4], placement_LP[layers, other * 4 + 1]
    groups.move(layers, (one, other), goers, loads_LE[layers, goers])
    groups.move(layers, (other, one), comers, loads_LE[layers, comers])
    after_LP = placement_LP.copy()
    after_LP[layers, one * 4], after_LP[layers, other * 4 + 1] = comers, goers
    assert np.allclose(groups.loads_LRG, of(after_LP, loads_LE).loads_LRG)


def test_an_exchange_that_brings_experts_to_their_groups_tears_less_than_nothing() -> None:
    # In order, but that 0 and 4 have changed places.
    placement_LP = np.arange(16)[None]
    placement_LP[0, [0, 4]] = 4, 0
    loads_LE = np.ones((1, 16))
    ranks = np.array([0]), np.array([1])
    experts = placement_LP[:, :4], placement_LP[:, 4:8]
    ones = np.ones((1, 4))
    torn_SS = of(placement_LP, loads_LE).torn(np.array([0]), ranks, experts, (ones, ones))[0]
    assert torn_SS[0, 0] == torn_SS.min() == -1.0
    assert torn_SS[1, 1] == torn_SS.max() == 1.0


def test_spare_slots_go_to_the_hot_and_then_to_the_coldest() -> None:
    load_LE = np.array([[40.0, 1, 2, 3, 4, 5, 6, 7], [8.0, 8, 8, 8, 8, 8, 8, 8]])
    copies_LE = replicate_hot(load_LE, 12, 4)
    assert copies_LE[0].tolist() == [4, 2, 1, 1, 1, 1, 1, 1]
    assert copies_LE.sum(axis=1).tolist() == [12, 12]


def test_ranks_with_room_for_groups_are_planned_with_less_of_them_torn() -> None:
    trace = skewed_trace(
        num_layers=6, num_experts=64, tokens=16_384, num_groups=8, topk_group=4, top_k=8, skew=1.0
    )
    now = even(trace, 80, 8)
    model = TimeModel.of_trace(trace)
    load_LE = trace.counts_NLE.sum(axis=0)
    plan = plan_placement(trace, now, num_ranks=8, model=model)
    alone = rearrange(now, load_LE.astype(float), num_ranks=8)
    together = [model.together(load_LE, placed, 8).mean() for placed in (plan.target_LP, alone)]
    assert together[0] > together[1]
    seconds = [
        model.layer_seconds(trace.counts_NLE, placed, num_ranks=8).sum()
        for placed in (plan.target_LP, alone)
    ]
    assert seconds[0] < seconds[1]
