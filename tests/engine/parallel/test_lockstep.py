"""All ranks draw the same conclusion from the same rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import ceil
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
