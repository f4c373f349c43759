"""Balancedness is lost time, replicas share rows, and the floor is that of uniform routing."""

import numpy as np
import pytest

from experts.balancedness import balancedness_of, copies_of, even_placement, rank_rows
from experts.noise_floor import Routing, UniformPasses, noise_floor

DEEPSEEK_V3 = Routing(num_experts=256, top_k=8, num_groups=8, topk_group=4)


def test_it_is_the_sum_of_means_over_the_sum_of_maxima() -> None:
    load = np.array([[[1.0, 3.0], [10.0, 10.0]], [[3.0, 1.0], [10.0, 10.0]]])
    measured = balancedness_of(load)
    assert measured.overall == pytest.approx(24 / 26)  # not the mean of 2/3 and 1
    assert measured.worst_layer == pytest.approx(2 / 3)
    assert measured.worst_layer_index == 0


def test_nothing_loaded_is_even() -> None:
    assert balancedness_of(np.zeros((2, 3, 4))).overall == 1.0


def test_replicas_share_their_experts_rows() -> None:
    counts, placement = np.array([[[9, 1]]]), np.array([[0, 0, 0, 1]])
    assert copies_of(placement, 2).tolist() == [[3, 1]]
    assert rank_rows(counts, placement, 2).tolist() == [[[6.0, 4.0]]]


@pytest.mark.parametrize(
    ("experts", "slots", "ranks"), [(256, 256, 8), (256, 288, 8), (256, 288, 72), (4, 20, 4)]
)
def test_an_even_placement_holds_every_expert_and_no_copy_beside_another(
    experts: int, slots: int, ranks: int
) -> None:
    placement = even_placement(experts, slots, ranks)
    assert set(placement.tolist()) == set(range(experts))
    held = placement.reshape(ranks, -1)
    if slots // ranks <= experts:
        assert all(len(set(row.tolist())) >= min(len(row), experts) for row in held)


def test_experts_in_order_without_spare_slots() -> None:
    assert even_placement(8, 8, 4).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("ranks", "batch", "floor"),
    [(4, 64, 0.94), (8, 64, 0.92), (8, 256, 0.965), (16, 128, 0.94), (32, 64, 0.91)],
)
def test_the_floor_of_deepseek_v3(ranks: int, batch: int, floor: float) -> None:
    drawn = noise_floor(
        DEEPSEEK_V3, tokens_per_pass=ranks * batch, num_ranks=ranks, num_slots=256, num_layers=58
    )
    assert drawn.overall == pytest.approx(floor, abs=0.01)
    assert drawn.worst_layer < drawn.overall


def test_more_tokens_than_are_drawn_raise_the_floor_by_the_root_of_their_number() -> None:
    floors = [
        noise_floor(DEEPSEEK_V3, tokens_per_pass=tokens, num_ranks=8, num_slots=256).overall
        for tokens in (2048, 4 * 2048, 16 * 2048)
    ]
    losses = [1 / floor - 1 for floor in floors]
    assert losses[0] / losses[1] == pytest.approx(2, rel=0.05)
    assert losses[1] / losses[2] == pytest.approx(2, rel=0.05)


def test_a_floor_is_drawn_again_alike() -> None:
    first, again = (
        noise_floor(DEEPSEEK_V3, tokens_per_pass=256, num_ranks=8, num_slots=256, num_layers=4)
        for _ in range(2)
    )
    assert first == again


@pytest.mark.parametrize("tokens", [64, 512, 2048, 50_000])
@pytest.mark.parametrize("ranks", [4, 8, 32])
def test_passes_drawn_once_stand_for_batches_of_any_size(tokens: int, ranks: int) -> None:
    drawn = noise_floor(DEEPSEEK_V3, tokens_per_pass=tokens, num_ranks=ranks, num_slots=256)
    scaled = UniformPasses(DEEPSEEK_V3, num_tokens=256).floor(
        tokens_per_pass=tokens, num_ranks=ranks, num_slots=256
    )
    assert scaled.overall == pytest.approx(drawn.overall, abs=0.02)
