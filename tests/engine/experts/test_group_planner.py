"""Ranks add up their windows and take one plan; a rank without its part holds up nobody."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from engine.experts.group_planner import GroupPlanner, MakePlan
from engine.experts.placements import ExpertPlacements
from engine.experts.side_thread import SideThread, gather_bytes
from engine.parallel.groups import RankGroup
from experts.even_plan import even_rounds
from experts.moves import Round
from experts.windows import LoadWindow
from runtime.errors import InternalError
from tests.engine.parallel.test_lockstep import thread_groups


def planners(num_ranks: int, make: MakePlan) -> list[GroupPlanner]:
    return [
        GroupPlanner(
            group,
            SideThread("planner"),
            ExpertPlacements([[0, 1, 2, 3]] * 2, 4, can_change=True),
            make,
        )
        for group in thread_groups(num_ranks)
    ]


def window(*loads: Sequence[int]) -> LoadWindow:
    return LoadWindow(first_pass=0, end_pass=8, counts_LE=np.array(loads))


def wait(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_all_ranks_take_the_plan_that_rank_0_made_of_all_windows() -> None:
    seen: list[LoadWindow] = []

    def make(load: LoadWindow, table: np.ndarray) -> Sequence[Round]:
        seen.append(load)
        return even_rounds(load, table, num_ranks=2, min_gain=0.01)

    ranks = planners(2, make)
    ranks[0].take_window(window([9, 7, 0, 1], [1, 1, 1, 1]))
    ranks[1].take_window(window([1, 2, 1, 0], [1, 1, 1, 1]))
    for rank in ranks:
        rank.start()
    for rank in ranks:
        wait(rank.is_done)
    first, second = (list(rank.take()) for rank in ranks)
    assert [load.counts_LE.tolist() for load in seen] == [[[10, 9, 1, 1], [2, 2, 2, 2]]]
    assert first == second
    assert {move.layer for moves in first for move in moves} == {0}, "the other layer is even"
    placed = [0, 1, 2, 3]
    for moves in first:
        for move in moves:
            assert placed[move.slot] == move.replaced
            placed[move.slot] = move.expert
    assert sorted(placed) == [0, 1, 2, 3]
    assert (0 in placed[:2]) != (1 in placed[:2]), "the two hot ones part"
    for rank in ranks:
        assert rank.is_idle
        rank.close()


def test_no_window_is_no_plan_and_an_error_is_everybodys() -> None:
    def fails(load: LoadWindow, table: np.ndarray) -> Sequence[Round]:
        raise ZeroDivisionError("no rate")

    ranks = planners(2, fails)
    ranks[0].take_window(window([1, 1, 1, 1], [1, 1, 1, 1]))
    for rank in ranks:
        rank.start()
    for rank in ranks:
        wait(rank.is_done)
        assert list(rank.take()) == []
    for rank in ranks:
        rank.take_window(window([1, 1, 1, 1], [1, 1, 1, 1]))
        rank.start()
    for rank in ranks:
        wait(lambda rank=rank: rank.is_idle)  # type: ignore[misc]
        with pytest.raises(InternalError, match="ZeroDivisionError: no rate"):
            rank.is_done()


def test_bytes_of_one_rank_are_its_own() -> None:
    assert gather_bytes(RankGroup(), b"") == [b""]
    assert gather_bytes(RankGroup(), b"abc") == [b"abc"]
