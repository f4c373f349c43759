"""Rank 0 reads what the gates of all ranks have counted, between two steps, and loses no answer."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import torch

from engine.experts.counted import CountedExperts
from engine.experts.counter import ExpertCounter, Reading
from experts.windows import LoadWindow, LoadWindows
from prefill.follower import Follower
from prefill.group_counter import GroupCounter
from prefill.kv_push import PushSettings
from prefill.rank_link import FollowerLink, LeaderLink
from prefill.rank_plan import Closure, ClosureOutcome
from tests.prefill.fakes import BLOCK_SIZE, FakeTicketSender
from tests.prefill.test_ranks import SHAPE, FollowerRunner, Meeting, make_group


class Ranks:
    """Rank 0's link and counter, and followers on threads."""

    def __init__(self, size: int) -> None:
        meeting = Meeting(size)
        self.groups = [make_group(rank, size, meeting) for rank in range(size)]
        self.counters = [ExpertCounter((0,), 4, 1) for _ in range(size)]
        self.link = LeaderLink(self.groups[0], SHAPE, 7)
        self.counter = GroupCounter(self._experts(0), self.link.count)
        self.followers = [self._follower(rank) for rank in range(1, size)]
        self.threads = [threading.Thread(target=each.run) for each in self.followers]
        for thread in self.threads:
            thread.start()

    def count(self, rank: int, expert: int, number: int) -> None:
        self.counters[rank].bins(0)[expert] += number

    def stop(self) -> None:
        self.link.stop()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()

    def _experts(self, rank: int) -> CountedExperts:
        experts = SimpleNamespace(counter=self.counters[rank], sharing=self.groups[rank])
        return cast(CountedExperts, experts)

    def _follower(self, rank: int) -> Follower:
        def count() -> Reading:
            experts = self._experts(rank)
            return experts.counter.start_reading(experts.sharing)

        return Follower(
            FollowerLink(self.groups[rank], SHAPE, 7),
            FollowerRunner(),
            FakeTicketSender(lambda closure: None),
            PushSettings(num_layers=3, layers_per_group=2),
            block_size=BLOCK_SIZE,
            count=count,
        )


def test_a_reading_is_of_all_ranks() -> None:
    ranks = Ranks(3)
    for rank, number in enumerate((5, 20, 300)):
        ranks.count(rank, 2, number)
    ranks.count(1, 0, 7)
    first = ranks.counter.start_reading().read()
    ranks.count(2, 0, 1)
    second = ranks.counter.start_reading().read()
    ranks.stop()
    assert first.tolist() == [[7, 0, 325, 0]]
    assert second.tolist() == [[8, 0, 325, 0]]
    assert ranks.counters[0].start_reading().read().tolist() == [[0, 0, 5, 0]], "its own are its"


def test_windows_are_sums_over_the_ranks_at_the_same_step() -> None:
    ranks, windows = Ranks(2), []
    followed = LoadWindows(ranks.counter)

    def take(window: LoadWindow) -> None:
        windows.append(window)

    followed.follow(2, take)
    for step in range(7):
        for rank in range(2):
            ranks.count(rank, step % 4, 10**rank)
        followed.passed()
    followed.deliver(wait=True)
    ranks.stop()
    assert [window.counts_LE.tolist() for window in windows] == [
        [[11, 11, 0, 0]],
        [[0, 0, 11, 11]],
        [[11, 11, 0, 0]],
    ]


def test_what_a_rank_says_meanwhile_is_not_lost() -> None:
    ranks = Ranks(2)
    closures = [Closure(nonce=nonce, outcome=ClosureOutcome.SENT) for nonce in (1, 2)]
    ranks.followers[0].ticket_closed(closures[0])
    ranks.counter.start_reading()
    ranks.followers[0].ticket_closed(closures[1])
    answer = ranks.link.exchange(None, b"")
    ranks.stop()
    told = [closed.closure.nonce for closed in answer.closed]
    assert told == [1, 2]
    assert torch.equal(ranks.counters[0].bins(0), torch.zeros(5, dtype=torch.int64))
