"""Long runs without a fault: looked at in parts as if at once, a slow rank told from an alarm."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from bench.ranks.judged import JudgedBlocks, alarms_of, longest_alarm
from bench.ranks.live import Stretch
from bench.ranks.quiet import QuietLog, beside_others, resident_mib, show_quiet
from router.pool.rank_watch import LOOK_S
from runtime.stragglers.rank_judge import MOST_BLOCKS
from runtime.stragglers.rank_waits import STEPS_OF_BLOCK, RankBlock
from runtime.stragglers.slow_ranks import SlowKind

pytestmark = pytest.mark.nightly

NUM_RANKS = 4
STEP_S = LOOK_S / STEPS_OF_BLOCK  # a look is a block


def blocks_of(
    count: int, *, slow_from: int | None = None, seed: int = 0
) -> dict[int, list[RankBlock]]:
    """Blocks of four ranks; rank 2 works a fifth longer before dispatch from one of them on."""
    random = np.random.default_rng(seed)
    blocks: dict[int, list[RankBlock]] = {rank: [] for rank in range(NUM_RANKS)}
    for number in range(count):
        is_slow = slow_from is not None and number >= slow_from
        work = 4e-3 * random.normal(1.0, 0.004, NUM_RANKS)
        work[2] *= 1.2 if is_slow else 1.0
        late = np.maximum(0.0, work[None, :] - work[:, None])  # [receiver, source]
        none = np.zeros((NUM_RANKS, NUM_RANKS))
        for rank in range(NUM_RANKS):
            waits = [none[rank].tolist(), late[rank].tolist(), none[rank].tolist()]
            own = [1e-3, float(work[rank]), 3e-3]
            blocks[rank].append(
                RankBlock(
                    number=number,
                    waits_s=waits,
                    own_s=own,
                    own_mean_s=own,
                    num_rows=64.0,
                    num_tokens=2.0,
                    num_context_tokens=128.0,
                )
            )
    return blocks


def parts_of(blocks: dict[int, list[RankBlock]], size: int) -> list[dict[int, list[RankBlock]]]:
    """The same blocks, one stretch after another: each counts from 0."""
    count = len(blocks[0])
    return [
        {
            rank: [
                dataclasses.replace(block, number=number)
                for number, block in enumerate(of_rank[first : first + size])
            ]
            for rank, of_rank in blocks.items()
        }
        for first in range(0, count, size)
    ]


def stretch_of(blocks: dict[int, list[RankBlock]]) -> Stretch:
    return Stretch(step_s=[STEP_S] * (STEPS_OF_BLOCK * len(blocks[0])), blocks=blocks)


def test_parts_are_looked_at_as_one_stretch() -> None:
    usual, blocks = blocks_of(20), blocks_of(36, slow_from=18, seed=1)
    whole = stretch_of(blocks).windows(usual)
    judged = JudgedBlocks(usual)
    in_parts = [found for part in parts_of(blocks, 6) for found in judged.hear(part)]
    assert in_parts == whole
    assert len(whole) == 36 - 4
    assert not any(whole[:14])
    assert {(each.kind, each.rank) for each in whole[-1]} == {(SlowKind.SENDER, 2)}


def test_only_the_newest_blocks_are_kept() -> None:
    judged = JudgedBlocks(blocks_of(40))
    for seed in range(5):
        judged.hear(blocks_of(30, seed=seed))
    assert {len(newest) for newest in judged._newest.values()} == {MOST_BLOCKS}


def test_a_look_comes_as_often_as_the_router_s() -> None:
    usual, blocks = blocks_of(20), blocks_of(40, seed=1)
    log = QuietLog(judged=JudgedBlocks(usual))
    quick = Stretch(step_s=[STEP_S / 4] * (STEPS_OF_BLOCK * 40), blocks=blocks)
    log.add(quick, [1.0] * NUM_RANKS)
    assert len(log.looks) == 40 // 4 - 1  # none before there are 100 steps
    assert log.look_s == pytest.approx([LOOK_S] * len(log.looks))


def test_a_rank_that_is_slower_in_every_part_is_told_from_an_alarm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = blocks_of(20)
    log = QuietLog(judged=JudgedBlocks(usual))
    lines = [
        log.add(stretch_of(blocks_of(30, slow_from=0, seed=seed)), [1.0, 2.0, 3.0, 4.0])
        for seed in range(3)
    ]
    assert "slow_sender 2" in lines[-1]
    report = log.report()
    assert report["windows"] == 3 * 30 - 4
    places: Any = report["places"]
    (place,) = places
    assert (place["kind"], place["rank"], place["source"]) == ("slow_sender", 2, -1)
    assert place["windows"] > 80
    least, median, most = place["own_beside_others_least_median_most"]["dispatch"]
    assert 0.18 < least <= median <= most < 0.22
    assert report["longest_alarm_s"] == pytest.approx(place["longest_s"])
    parts = report["parts"]
    assert isinstance(parts, list)
    assert [part["windows_with_a_fault"] > 24 for part in parts] == [True] * 3
    assert parts[0]["own_beside_others"]["dispatch"][2] == pytest.approx(0.2, abs=0.02)
    show_quiet(report)
    said = capsys.readouterr().out
    assert f"{place['windows']} windows, " in said
    assert "in the median of 3 parts" in said


def test_nothing_is_told_of_ranks_that_are_alike() -> None:
    log = QuietLog(judged=JudgedBlocks(blocks_of(20)))
    for seed in range(3):
        log.add(stretch_of(blocks_of(30, seed=seed)), [1.0] * NUM_RANKS)
    report = log.report()
    assert report["alarms"] == []
    assert report["places"] == []
    assert report["longest_alarm_s"] == 0.0
    assert longest_alarm(log.looks) == 0
    assert alarms_of(log.looks, frozenset()) == []


def test_work_is_beside_the_lower_median_rank() -> None:
    own = np.array([[1.0, 2.0, 4.0, 8.0]] * 3)
    assert beside_others(own)[0].tolist() == [-0.5, 0.0, 1.0, 3.0]


def test_memory_of_this_process_is_read() -> None:
    assert 10.0 < resident_mib() < 1e5
