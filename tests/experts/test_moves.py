"""Moves lead from one placement to another, and every placement between can serve."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.moves import Round, order_moves


def random_placement(
    generator: np.random.Generator, *, num_layers: int, num_experts: int, num_slots: int
) -> np.ndarray:
    """[L, P] int64: every expert once, the other slots at random."""
    rows = []
    for _ in range(num_layers):
        more = generator.integers(0, num_experts, num_slots - num_experts)
        rows.append(generator.permutation(np.concatenate([np.arange(num_experts), more])))
    return np.stack(rows).astype(np.int64)


def replay(current_LP: np.ndarray, rounds: tuple[Round, ...], num_ranks: int) -> np.ndarray:
    """Flip round after round, checking that each could be staged and that all experts stand."""
    placement_LP = current_LP.copy()
    share = placement_LP.shape[1] // num_ranks
    experts = set(placement_LP[0].tolist())
    for moves in rounds:
        assert moves
        ranks = [move.slot // share for move in moves]
        assert len(set(ranks)) == len(ranks)
        for move in moves:
            assert move.sources
            assert placement_LP[move.layer, move.slot] == move.replaced != move.expert
            assert (placement_LP[move.layer, list(move.sources)] == move.expert).all()
            held = (placement_LP[move.layer] == move.expert).sum()
            assert held == len(move.sources)
        for move in moves:
            placement_LP[move.layer, move.slot] = move.expert
        for row in placement_LP:
            assert set(row.tolist()) == experts
    return placement_LP


def by_rank(placement_LP: np.ndarray, num_ranks: int) -> np.ndarray:
    """[L, R, P / R], each rank's experts in order of their numbers."""
    return np.sort(placement_LP.reshape(len(placement_LP), num_ranks, -1), axis=2)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    num_ranks=st.sampled_from([1, 2, 4, 8]),
    per_rank=st.integers(2, 5),
    redundant=st.integers(0, 8),
)
def test_every_round_can_be_staged_and_leaves_all_experts_standing(
    seed: int, num_ranks: int, per_rank: int, redundant: int
) -> None:
    generator = np.random.default_rng(seed)
    num_slots = num_ranks * per_rank
    num_experts = max(num_slots - redundant, 1)
    shape = {"num_layers": 3, "num_experts": num_experts, "num_slots": num_slots}
    current, target = (random_placement(generator, **shape) for _ in range(2))
    reached, rounds = order_moves(current, target, num_ranks=num_ranks)
    assert np.array_equal(replay(current, rounds, num_ranks), reached)
    assert np.array_equal(by_rank(reached, num_ranks), by_rank(target, num_ranks))
    assert sum(map(len, rounds)) <= (current != target).sum()


def test_a_circle_of_last_copies_is_one_round() -> None:
    current, target = np.array([[0, 1, 2, 3]]), np.array([[1, 2, 3, 0]])
    _, rounds = order_moves(current, target, num_ranks=4)
    assert [[(move.slot, move.expert) for move in moves] for moves in rounds] == [
        [(0, 1), (3, 0), (2, 3), (1, 2)]
    ]


def test_circles_of_several_slots_of_a_rank_are_cut() -> None:
    # Two ranks exchange both of their experts: two rounds, because a rank stages one at a time.
    current, target = np.array([[0, 1, 2, 3]]), np.array([[2, 3, 0, 1]])
    _, rounds = order_moves(current, target, num_ranks=2)
    assert [len(moves) for moves in rounds] == [2, 2]


@pytest.mark.parametrize("redundant", [0, 32])
def test_rounds_are_hardly_more_than_the_busiest_rank_receives(redundant: int) -> None:
    generator = np.random.default_rng(3)
    shape = {"num_layers": 12, "num_experts": 96 - redundant, "num_slots": 96}
    current, target = (random_placement(generator, **shape) for _ in range(2))
    _, rounds = order_moves(current, target, num_ranks=8)
    received = Counter(move.slot // 12 for moves in rounds for move in moves)
    assert max(received.values()) <= len(rounds) <= 1.15 * max(received.values())


def test_a_chain_of_last_copies_needs_no_round_more_than_one() -> None:
    # Expert 0 has a copy to spare, so nobody need close a circle; all still move at one step.
    current, target = np.array([[0, 1, 2, 0]]), np.array([[1, 2, 0, 0]])
    _, rounds = order_moves(current, target, num_ranks=4)
    assert [sorted(move.slot for move in moves) for moves in rounds] == [[0, 1, 2]]


def test_what_loses_all_its_slots_leaves_the_last_one_behind_an_arrival() -> None:
    # Expert 1 leaves both of its slots, and its one way is to slot 0, of a rank that is busy first.
    current = np.array([[0, 0, 1, 1], [0, 1, 1, 0]])
    target = np.array([[1, 0, 1, 1], [1, 0, 0, 0]])
    _, rounds = order_moves(current, target, num_ranks=4)
    replay(current, rounds, 4)
    when = {(move.layer, move.slot): at for at, moves in enumerate(rounds) for move in moves}
    assert when[1, 0] == 1
    assert sorted([when[1, 1], when[1, 2]]) == [0, 1]


def test_moves_of_different_layers_share_rounds() -> None:
    current = np.array([[0, 1, 2, 3], [0, 1, 2, 3]])
    target = np.array([[1, 0, 2, 3], [0, 1, 3, 2]])
    _, rounds = order_moves(current, target, num_ranks=4)
    assert [sorted(move.layer for move in moves) for moves in rounds] == [[0, 0, 1, 1]]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_layers_begin_in_the_order_that_is_asked_for(order: list[int]) -> None:
    current = np.array([[0, 1], [0, 1]])
    _, rounds = order_moves(current, current[:, ::-1].copy(), num_ranks=2, layers=order)
    assert [moves[0].layer for moves in rounds] == order


def test_nothing_moves_where_nothing_changes() -> None:
    current = np.array([[0, 1, 1, 0]])
    reached, rounds = order_moves(current, current, num_ranks=2)
    assert rounds == ()
    assert np.array_equal(reached, current)
