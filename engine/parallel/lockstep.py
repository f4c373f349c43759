"""How the data-parallel ranks of one instance keep step: one message of fixed shape before each.

The same for prefill and decode; what a step is, and when its results are read, their loops know.

In every MoE layer the ranks exchange tokens, so all of them must run the same number of steps. Each
step begins with an all-gather of one row a rank. From the rows all ranks draw the same conclusion,
without a leader: run a step (with a dummy batch where a rank has no work of its own), rest because
nobody has work, or leave because everybody wants to. The shape never depends on the state, so ranks
cannot enter different collectives; the epoch in each row says if a rank is of another life.

A rank that dies breaks the collective: the others get PeerLostError, and the instance is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.parallel.groups import RankGroup
from runtime.errors import StaleTicketError

GROUP_IDLE_WAIT_S = 0.003
"""Idle in a group: another rank's first token waits at most so long for us."""
GROUP_SLEEP_WAIT_S = 0.01
"""The same, once the group has been idle for `GROUP_SLEEP_AFTER_S`: meeting costs CPU time."""
GROUP_SLEEP_AFTER_S = 1.0

_HAS_WORK, _NUM_TOKENS, _LEAVING, _EPOCH, _IN_FLIGHT = range(5)
_NUM_FIELDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What one rank says before a step.

    Attributes:
        num_tokens: tokens that it is going to run; 0 is no work.
        leaving: it has been asked to stop, and goes on only for the others.
        in_flight: it has launched a step whose results it has not read; they may bring work.
    """

    num_tokens: int
    leaving: bool = False
    in_flight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """What all ranks conclude.

    Attributes:
        has_work: at least one rank runs tokens, so all take the step.
        max_num_tokens: most tokens of a rank in this step.
        mean_num_tokens: tokens of a rank in this step on average, rounded up.
        all_leaving: no rank needs another step, ever.
        in_flight: at least one rank has a step in flight, so all come again at once.
        any_leaving: at least one rank was asked to stop: without it there is no group.
    """

    has_work: bool
    max_num_tokens: int
    mean_num_tokens: int
    all_leaving: bool
    in_flight: bool = False
    any_leaving: bool = False


class Lockstep(Protocol):
    """The meeting of the ranks before a step."""

    @property
    def is_group(self) -> bool:
        """Whether other ranks wait for this one."""
        ...

    def exchange(self, state: RankState) -> GroupState:
        """Say our state, and return what the group concludes; blocks until every rank has called.

        Raises:
            PeerLostError: a rank died or did not come in time; the group is over.
        """
        ...


class SoloLockstep:
    """A rank that is alone."""

    is_group = False

    def exchange(self, state: RankState) -> GroupState:
        """Our own state is the group's."""
        return GroupState(
            has_work=state.num_tokens > 0,
            max_num_tokens=state.num_tokens,
            mean_num_tokens=state.num_tokens,
            all_leaving=state.leaving,
            in_flight=state.in_flight,
            any_leaving=state.leaving,
        )


class GroupLockstep:
    """One of several ranks, over a group whose collectives work on host memory."""

    is_group = True

    def __init__(self, group: RankGroup, epoch: int) -> None:
        """`epoch` is the instance's, below 2**63 (see `agree_on_epoch`)."""
        self._group = group
        self._epoch = epoch

    def exchange(self, state: RankState) -> GroupState:
        """One all-gather of [5] int64 a rank."""
        row = torch.zeros(1, _NUM_FIELDS, dtype=torch.int64)
        row[0, _HAS_WORK] = int(state.num_tokens > 0)
        row[0, _NUM_TOKENS] = state.num_tokens
        row[0, _LEAVING] = int(state.leaving)
        row[0, _EPOCH] = self._epoch
        row[0, _IN_FLIGHT] = int(state.in_flight)
        rows = self._group.all_gather(row).tolist()
        epochs = [item[_EPOCH] for item in rows]
        if any(epoch != self._epoch for epoch in epochs):
            raise StaleTicketError(f"ranks of different lives meet: epochs {epochs}")
        return GroupState(
            has_work=any(item[_HAS_WORK] for item in rows),
            max_num_tokens=max(item[_NUM_TOKENS] for item in rows),
            mean_num_tokens=-(-sum(item[_NUM_TOKENS] for item in rows) // len(rows)),
            all_leaving=all(item[_LEAVING] for item in rows),
            in_flight=any(item[_IN_FLIGHT] for item in rows),
            any_leaving=any(item[_LEAVING] for item in rows),
        )


def create_lockstep(group: RankGroup, epoch: int) -> Lockstep:
    """The lockstep that fits the number of ranks."""
    return GroupLockstep(group, epoch) if group.size > 1 else SoloLockstep()


class IdlePace:
    """How long a rank of a group may sleep before the next meeting, when nobody has work."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._busy_at = clock()

    def was_busy(self) -> None:
        """The group has work, or had some a moment ago."""
        self._busy_at = self._clock()

    @property
    def wait_s(self) -> float:
        """Seconds until the next meeting."""
        is_asleep = self._clock() - self._busy_at >= GROUP_SLEEP_AFTER_S
        return GROUP_SLEEP_WAIT_S if is_asleep else GROUP_IDLE_WAIT_S
