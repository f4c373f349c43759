"""Blocks of all ranks of an instance become a picture; what is slow is in it and in metrics."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from bench.ranks.played import Fault, play
from router.metrics.ranks import RankMetrics
from router.pool.members import WorkerKey
from router.pool.rank_watch import KEPT_BLOCKS, LOOK_S, RankWatch
from runtime.pb import registry_pb2
from runtime.stragglers.rank_picture import (
    block_from_proto,
    block_to_proto,
    describe,
    picture_from_proto,
    picture_of,
    picture_to_proto,
    words_of,
)
from runtime.stragglers.rank_waits import RankBlock, WaitWindow
from runtime.stragglers.slow_ranks import SlowKind, find_slow

LIFE = ("decode-0", 7)


def blocks_of(window: WaitWindow, rank: int, first: int = 0) -> list[RankBlock]:
    return [
        RankBlock(
            number=first + number,
            waits_s=window.waits_s[number, :, rank].tolist(),
            first_waits_s=window.first_waits_s[number, :, rank].tolist(),
            own_s=window.own_s[number, :, rank].tolist(),
            own_mean_s=window.own_mean_s[number, :, rank].tolist(),
            num_rows=float(window.num_rows[number, rank]),
            num_tokens=float(window.num_tokens[number, rank]),
            num_context_tokens=float(window.num_context_tokens[number, rank]),
        )
        for number in range(len(window.own_s))
    ]


def slow_window(rank: int = 2) -> WaitWindow:
    (window,) = play(1, 4, Fault(ranks=(rank,), attention=1.1), seed=4)
    return window


class Told:
    """A watch that ranks tell of their blocks."""

    def __init__(self) -> None:
        self.now = 0.0
        self.watch = RankWatch(lambda: self.now)

    def tell(self, window: WaitWindow, ranks: range = range(4), first: int = 0) -> None:
        for rank in ranks:
            messages = [block_to_proto(block) for block in blocks_of(window, rank, first)]
            self.watch.heard(WorkerKey(*LIFE, rank), 4, messages)


def test_blocks_travel_as_they_are() -> None:
    for block in blocks_of(slow_window(), 1):
        back = block_from_proto(
            registry_pb2.RankBlock.FromString(block_to_proto(block).SerializeToString())
        )
        assert back.number == block.number
        assert back.own_s == pytest.approx(block.own_s)
        for phase, waits in enumerate(block.waits_s):
            assert back.waits_s[phase] == pytest.approx(waits)


def test_a_picture_comes_once_all_ranks_have_told_and_says_who_is_slow() -> None:
    told = Told()
    told.tell(slow_window(), range(3))
    assert told.watch.pictures([LIFE]) == []
    told.tell(slow_window(), range(3, 4))
    (picture,) = told.watch.pictures([LIFE])
    assert picture.instance == "decode-0"
    assert [(found.kind, found.rank) for found in picture.findings] == [(SlowKind.SENDER, 2)]
    assert picture.waited_for(2) > picture.waited_for(1)
    assert "slow_sender: rank 2, 1.11x" in words_of(picture.findings[0])
    told_again = picture_from_proto(picture_to_proto(picture))
    assert describe(told_again)["findings"] == describe(picture)["findings"]


def test_an_instance_is_looked_at_again_when_there_is_news_and_not_too_often() -> None:
    told = Told()
    told.tell(slow_window(1))
    (first,) = told.watch.pictures([LIFE])
    told.tell(slow_window(3), first=5)
    assert told.watch.pictures([LIFE]) == [first]
    told.now += LOOK_S
    (second,) = told.watch.pictures([LIFE])
    assert second.findings[0].rank == 3
    told.now += LOOK_S
    assert told.watch.pictures([LIFE])[0] is second, "nothing new was told"


def test_ranks_that_renew_at_different_times_still_have_blocks_in_common() -> None:
    told = Told()
    told.tell(slow_window())
    for first in range(5, KEPT_BLOCKS, 5):
        told.tell(slow_window(), range(3), first=first)
    told.now += LOOK_S
    assert told.watch.pictures([LIFE])[0].findings[0].rank == 2


def test_an_instance_that_is_gone_is_forgotten_and_alone_there_is_nothing() -> None:
    told = Told()
    told.tell(slow_window())
    assert told.watch.pictures([LIFE])
    assert told.watch.pictures([]) == []
    assert told.watch.pictures([LIFE]) == []
    told.watch.heard(WorkerKey(*LIFE, 0), 1, [registry_pb2.RankBlock()])
    assert told.watch.pictures([LIFE]) == []


def test_metrics_say_who_is_waited_for_and_end_with_the_instance() -> None:
    registry = CollectorRegistry()
    metrics = RankMetrics(registry)
    picture = picture_of("decode-0", slow_window(), find_slow(slow_window()))
    metrics.set_pictures([picture])

    def slow(kind: str) -> float | None:
        return registry.get_sample_value("pd_ranks_slow", {"worker": "decode-0", "kind": kind})

    waits = {"worker": "decode-0", "rank": "2"}
    assert slow("slow_sender") == 1.0
    assert [slow(kind.value) for kind in SlowKind].count(0.0) == len(SlowKind) - 1
    assert registry.get_sample_value("pd_rank_wait_ratio", waits) == picture.waited_for(2)
    metrics.set_pictures([])
    assert slow("slow_sender") == 0.0
    assert registry.get_sample_value("pd_rank_wait_ratio", waits) == 0.0
