"""Experts move while steps run, on all ranks at one step; what goes wrong ends or retreats."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts.placements import ExpertPlacements
from engine.experts.rebalancer import Stage
from engine.experts.votes import PlacementMismatchError
from engine.parallel.lockstep import GroupLockstep, RankState
from tests.engine.experts.moving_world import MovingWorld, Wire
from tests.engine.parallel.test_lockstep import thread_groups

FATES = st.sampled_from([0, 0, 0, 0, 1, 3, "lost", "failed", "late", "torn"])


def stages(world: MovingWorld) -> set[Stage]:
    return {rank.rebalancer.stage for rank in world.ranks}


@settings(deadline=None, max_examples=12)
@given(
    shape=st.sampled_from([(2, 4, 4), (2, 4, 6), (4, 8, 8), (4, 8, 12), (4, 4, 8)]),
    seed=st.integers(0, 10**6),
    delays=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    piece_bytes=st.sampled_from([256, 512, 10**6]),
    is_mapped=st.booleans(),
)
def test_weights_and_maps_move_together(
    shape: tuple[int, int, int],
    seed: int,
    delays: list[int],
    piece_bytes: int,
    is_mapped: bool,
) -> None:
    rng = random.Random(seed)
    wire = Wire(fate=lambda source, reader: rng.choice(delays))
    num_ranks, num_experts, num_slots = shape
    world = MovingWorld(
        num_ranks,
        num_experts,
        num_slots,
        width=150,
        seed=seed,
        wire=wire,
        timeout_s=1e9,
        piece_bytes=piece_bytes,
        is_mapped=is_mapped,
    )
    for _ in range(100):
        world.step()
        world.check()
    counts = world.ranks[0].rebalancer.counts
    assert counts.num_moves > 0
    assert counts.num_retreats == 0
    assert world.ranks[0].rebalancer.epoch == counts.num_rounds > 1


@settings(deadline=None, max_examples=15)
@given(fates=st.lists(FATES, min_size=1, max_size=8), seed=st.integers(0, 10**6))
def test_whatever_happens_to_a_copy_ranks_agree_and_come_to_an_end(
    fates: list[int | str], seed: int
) -> None:
    left = list(fates)
    wire = Wire(fate=lambda source, reader: left.pop() if left else 0)
    world = MovingWorld(4, 8, 12, seed=seed, wire=wire, timeout_s=0.1, num_layers=1, interval=1)
    counts, after = world.ranks[0].rebalancer.counts, 0
    for _ in range(4000):
        world.step()
        assert len(stages(world)) == 1
        if counts.num_rounds + counts.num_retreats > after:
            after = counts.num_rounds + counts.num_retreats
            world.check()
        if not left and counts.num_plans and stages(world) == {Stage.RESTING}:
            break
    moved = counts.num_rounds
    for _ in range(200):
        world.step()
        if counts.num_rounds > moved:
            break
    else:
        raise AssertionError("copies arrive again, and nothing moves")
    world.step()
    world.check()


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ("lost", "sending did not end within 0.1 s"),
        ("failed", "it was refused"),
        ("torn", "the canary of an expert that was staged does not fit"),
    ],
)
def test_a_copy_that_fails_is_given_up_by_all_and_said(
    fate: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = MovingWorld(2, 4, 4, wire=Wire(fate=lambda source, reader: fate), timeout_s=0.1)
    for _ in range(60):
        world.step()
    for rank in world.ranks:
        assert rank.rebalancer.counts.num_retreats > 0
        assert rank.rebalancer.epoch == 0
        assert rank.wire.recovered == rank.rebalancer.counts.num_retreats
    assert any(reason in rank.rebalancer.last_retreat for rank in world.ranks)
    assert "gave up moving experts" in caplog.text
    assert reason in caplog.text
    world.check()


def test_tries_come_later_after_each_retreat() -> None:
    world = MovingWorld(2, 4, 4, wire=Wire(fate=lambda source, reader: "failed"), interval=4)
    tries: list[int] = []
    for step in range(200):
        before = world.ranks[0].rebalancer.counts.num_retreats
        world.step()
        if world.ranks[0].rebalancer.counts.num_retreats > before:
            tries.append(step)
    gaps = np.diff(tries)
    assert (gaps[1:] > 1.5 * gaps[:-1]).all(), gaps


def test_a_wire_that_does_not_come_back_stops_the_moves_and_says_so() -> None:
    world = MovingWorld(2, 4, 4, wire=Wire(fate=lambda source, reader: "failed"))
    world.ranks[1].wire.recovery_fails = True
    for _ in range(100):
        world.step()
    assert stages(world) == {Stage.STOPPED}
    assert "no way back" in world.ranks[1].rebalancer.problem
    assert all(rank.rebalancer.problem for rank in world.ranks)
    world.check()


def test_a_planner_that_fails_is_a_retreat() -> None:
    world = MovingWorld(2, 4, 4)
    world.ranks[0].planner.error = "no load"
    for _ in range(20):
        world.step()
    assert world.ranks[0].rebalancer.last_retreat == "planning: no load"
    assert world.ranks[1].rebalancer.last_retreat == "another rank could not end it"
    world.ranks[0].planner.error = ""
    for _ in range(100):
        world.step()
    assert world.ranks[0].rebalancer.epoch > 0


def test_a_plan_that_moves_nothing_is_over_at_once() -> None:
    world = MovingWorld(2, 4, 4, targets=lambda index: None, interval=2)
    for _ in range(40):
        world.step()
    counts = world.ranks[0].rebalancer.counts
    assert (counts.num_plans > 5, counts.num_rounds, counts.num_retreats) == (True, 0, 0)


def test_nobody_plans_while_nobody_has_work() -> None:
    world = MovingWorld(2, 4, 4, interval=2)
    for _ in range(20):
        world.step(has_work=False)
    assert world.ranks[0].rebalancer.counts.num_plans == 0


@pytest.mark.parametrize("what", ["flip", "turn"])
def test_a_rank_that_misses_a_flip_ends_the_group_before_a_step(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = MovingWorld(4, 8, 8)
    victim = world.ranks[2].rebalancer
    if what == "flip":
        monkeypatch.setattr(type(victim), "_flip", _flip_of_all_but(victim))
    else:
        advance = type(victim)._advance
        monkeypatch.setattr(
            type(victim), "_advance", lambda self: None if self is victim else advance(self)
        )

    def run() -> None:
        for _ in range(100):
            world.step()  # asserts that no step runs on unlike tables

    with pytest.raises(PlacementMismatchError, match="rank 2"):
        run()


def _flip_of_all_but(victim: object) -> object:
    flip = type(victim)._flip  # type: ignore[attr-defined]
    return lambda self, moves: None if self is victim else flip(self, moves)


def test_a_slot_is_not_filled_where_maps_refuse() -> None:
    placements = ExpertPlacements([[0, 1, 2, 2]], 3, can_change=True)
    maps = placements.maps.clone()
    with pytest.raises(ValueError, match="expert 0 of layer 0 would have 0 slots"):
        placements.move([(0, 0, 1)])
    assert placements.maps.equal(maps)
    assert placements.table == ((0, 1, 2, 2),)


@pytest.mark.timeout(120)
def test_72_ranks_as_threads() -> None:
    """Each rank a thread, with the real message; the last one dies in the middle."""
    num_ranks, num_steps = 72, 60
    rng = random.Random(5)
    wire = Wire(fate=lambda source, reader: rng.choice([0, 0, 1]))
    world = MovingWorld(num_ranks, 72, 144, num_layers=1, wire=wire, timeout_s=1e9)
    groups = thread_groups(num_ranks)
    seen: list[list[int]] = [[] for _ in range(num_ranks)]

    def run(number: int) -> str:
        rank, lockstep = world.ranks[number], GroupLockstep(groups[number], 9)
        for step in range(num_steps):
            if number == num_ranks - 1 and step == num_steps - 5:
                groups[number].barrier_.abort()
                return "died"
            state = RankState(num_tokens=1, experts=rank.rebalancer.say())
            seen[number].append(hash(rank.placements.table))
            try:
                group = lockstep.exchange(state)
            except Exception as error:
                return type(error).__name__
            rank.check()
            rank.rebalancer.hear(group.experts, has_work=group.has_work)
        return "went on"

    with ThreadPoolExecutor(num_ranks) as threads:
        ends = list(threads.map(run, range(num_ranks)))
    assert ends.count("died") == 1
    assert "went on" not in ends
    for steps in zip(*seen, strict=False):
        assert len(set(steps)) == 1
    assert world.ranks[0].rebalancer.epoch > 2
