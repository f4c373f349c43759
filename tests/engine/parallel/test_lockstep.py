"""All ranks draw the same conclusion from the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import ceil
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts.votes import PlacementMismatchError, Verdict, Vote, Word
from engine.parallel.groups import RankGroup, agree_on_epoch
from engine.parallel.lockstep import (
    GROUP_IDLE_WAIT_S,
    GROUP_SLEEP_AFTER_S,
    GROUP_SLEEP_WAIT_S,
    GroupLockstep,
    GroupState,
    IdlePace,
    RankState,
    SoloLockstep,
    create_lockstep,
)
from runtime.errors import StaleTicketError


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadGroup(RankGroup):
    """Ranks as threads of this process."""

    barrier_: Barrier
    board: list[torch.Tensor] = field(default_factory=list)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.board[self.rank] = tensor.clone()
        self.barrier_.wait(60)
        gathered = torch.cat(self.board)
        self.barrier_.wait(60)
        return gathered


def thread_groups(size: int) -> list[ThreadGroup]:
    barrier, board = Barrier(size), [torch.empty(0)] * size
    return [
        ThreadGroup(rank=rank, size=size, barrier_=barrier, board=board) for rank in range(size)
    ]


def exchange(states: list[RankState], epochs: list[int]) -> list[GroupState]:
    groups = thread_groups(len(states))
    with ThreadPoolExecutor(len(states)) as threads:
        return list(
            threads.map(
                lambda group, epoch, state: GroupLockstep(group, epoch).exchange(state),
                groups,
                epochs,
                states,
            )
        )


STATES = st.builds(
    RankState, num_tokens=st.integers(0, 512), leaving=st.booleans(), in_flight=st.booleans()
)


@settings(max_examples=25, deadline=None)
@given(states=st.lists(STATES, min_size=2, max_size=4))
def test_all_ranks_conclude_the_same(states: list[RankState]) -> None:
    conclusions = exchange(states, [2**63 - 1] * len(states))
    assert conclusions == [
        GroupState(
            has_work=any(state.num_tokens for state in states),
            max_num_tokens=max(state.num_tokens for state in states),
            mean_num_tokens=ceil(sum(state.num_tokens for state in states) / len(states)),
            all_leaving=all(state.leaving for state in states),
            in_flight=any(state.in_flight for state in states),
            any_leaving=any(state.leaving for state in states),
        )
    ] * len(states)


def test_ranks_of_different_lives_refuse_each_other() -> None:
    with pytest.raises(StaleTicketError, match=r"epochs \[3, 4\]"):
        exchange([RankState(num_tokens=0)] * 2, [3, 4])


def test_alone() -> None:
    lockstep = create_lockstep(RankGroup(), 5)
    assert isinstance(lockstep, SoloLockstep)
    state = lockstep.exchange(RankState(num_tokens=3, leaving=True))
    assert state == GroupState(
        has_work=True, max_num_tokens=3, mean_num_tokens=3, all_leaving=True, any_leaving=True
    )


def test_idle_ranks_meet_less_often_after_a_while() -> None:
    now = [100.0]
    pace = IdlePace(lambda: now[0])
    assert pace.wait_s == GROUP_IDLE_WAIT_S
    now[0] += GROUP_SLEEP_AFTER_S
    assert pace.wait_s == GROUP_SLEEP_WAIT_S
    pace.was_busy()
    assert pace.wait_s == GROUP_IDLE_WAIT_S


def test_the_epoch_is_rank_zeros() -> None:
    with ThreadPoolExecutor(3) as threads:
        epochs = list(threads.map(agree_on_epoch, thread_groups(3)))
    assert len(set(epochs)) == 1
    assert 0 < epochs[0] < 2**63
    assert agree_on_epoch(RankGroup()) != agree_on_epoch(RankGroup())


def test_words_of_experts_ride_along() -> None:
    far = 2**63 - 1  # whatever a placement is called
    ready = [RankState(num_tokens=0, experts=Word(far, 5, Vote.READY))] * 3
    assert {state.experts for state in exchange(ready, [1] * 3)} == {Verdict.GO}
    waiting = [*ready[1:], RankState(num_tokens=0, experts=Word(far, 5, Vote.WAIT))]
    assert {state.experts for state in exchange(waiting, [1] * 3)} == {Verdict.WAIT}
    failed = [*waiting[1:], RankState(num_tokens=4, experts=Word(far, 5, Vote.FAILED))]
    assert {state.experts for state in exchange(failed, [1] * 3)} == {Verdict.RETREAT}
    assert SoloLockstep().exchange(ready[0]).experts is Verdict.GO


def test_no_step_of_ranks_whose_experts_stand_unlike() -> None:
    states = [RankState(num_tokens=1, experts=Word(placement)) for placement in (3, 3, 4)]
    with pytest.raises(PlacementMismatchError, match="rank 2"):
        exchange(states, [1] * 3)


@dataclass
class Rider:
    """Says two numbers, and notes what it hears."""

    own: int
    width: int = 2
    heard: list[tuple[list[list[int]], int]] = field(default_factory=list)

    def say(self) -> list[int]:
        return [self.own, 2**62]

    def hear(self, rows: Sequence[Sequence[int]], most_requests: int) -> None:
        self.heard.append(([list(row) for row in rows], most_requests))


def test_what_rides_along_is_heard_by_all_in_the_order_of_ranks() -> None:
    riders, groups = [Rider(5), Rider(6), Rider(7)], thread_groups(3)
    with ThreadPoolExecutor(3) as threads:
        states = threads.map(
            lambda group, rider: GroupLockstep(group, 7, rider=rider).exchange(
                RankState(num_tokens=rider.own)
            ),
            groups,
            riders,
        )
    assert [state.max_num_tokens for state in states] == [7, 7, 7]
    assert [rider.heard for rider in riders] == [[([[own, 2**62] for own in (5, 6, 7)], 7)]] * 3


def test_a_rank_alone_hears_itself() -> None:
    rider = Rider(3)
    create_lockstep(RankGroup(), 5, rider=rider).exchange(RankState(num_tokens=0))
    assert rider.heard == [([[3, 2**62]], 0)]
