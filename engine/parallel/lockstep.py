"""How the data-parallel ranks of one instance synchronise: one message of fixed shape before each.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.experts.votes import NO_WORD, NUM_WORD_FIELDS, Verdict, Vote, Word, conclude
from engine.parallel.groups import RankGroup
from engine.parallel.wait_recorder import WaitRecorder
from runtime.errors import StaleTicketError
from runtime.stragglers.rank_waits import Phase

GROUP_IDLE_WAIT_S = 0.003
"""Idle in a group: another rank's first token waits at most so long for us."""
GROUP_SLEEP_WAIT_S = 0.01
"""The same, once the group has been idle for `GROUP_SLEEP_AFTER_S`: meeting costs CPU time."""
GROUP_SLEEP_AFTER_S = 1.0

_HAS_WORK, _NUM_TOKENS, _LEAVING, _EPOCH, _IN_FLIGHT, _EXPERTS = range(6)
_NUM_FIELDS = _EXPERTS + NUM_WORD_FIELDS


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What one rank says before a step.

    Attributes:
        num_tokens: tokens that it is going to run; 0 is no work.
        leaving: it has been asked to stop, and goes on only for the others.
        in_flight: it has launched a step whose results it has not read; they may bring work.
        experts: how they stand in that step, and what it says of those that move.
    """

    num_tokens: int
    leaving: bool = False
    in_flight: bool = False
    experts: Word = NO_WORD


class Rider(Protocol):
    """What rides in the message beside our state: numbers that the lockstep does not understand."""

    @property
    def width(self) -> int:
        """How many numbers a rank says; the same on all ranks, and always."""
        ...

    def say(self) -> list[int]:
        """Return them, each below 2**63; asked once before each meeting."""
        ...

    def hear(self, rows: Sequence[Sequence[int]], most_requests: int) -> None:
        """Take what every rank said, in the order of ranks; the same on all of them.

        Args:
            rows: one a rank.
            most_requests: `GroupState.max_num_tokens`, 0 where there is no step.
        """
        ...


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
        experts: what all conclude for those that move.
    """

    has_work: bool
    max_num_tokens: int
    mean_num_tokens: int
    all_leaving: bool
    in_flight: bool = False
    any_leaving: bool = False
    experts: Verdict = Verdict.WAIT


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
            PlacementMismatchError: experts do not stand alike on all ranks; it is over too.
        """
        ...


class SoloLockstep:
    """A rank that is alone."""

    is_group = False

    def __init__(self, rider: Rider | None = None) -> None:
        """`rider` hears what it says."""
        self._rider = rider

    def exchange(self, state: RankState) -> GroupState:
        """Our own state is the group's."""
        if self._rider is not None:
            self._rider.hear([self._rider.say()], state.num_tokens)
        return GroupState(
            has_work=state.num_tokens > 0,
            max_num_tokens=state.num_tokens,
            mean_num_tokens=state.num_tokens,
            all_leaving=state.leaving,
            in_flight=state.in_flight,
            any_leaving=state.leaving,
            experts=conclude([state.experts]),
        )


class GroupLockstep:
    """One of several ranks, over a group whose collectives work on host memory."""

    is_group = True

    def __init__(
        self,
        group: RankGroup,
        epoch: int,
        waits: WaitRecorder | None = None,
        *,
        rider: Rider | None = None,
    ) -> None:
        """Meet in a group.

        Args:
            group: whose collectives work on host memory.
            epoch: of the instance, below 2**63 (see `agree_on_epoch`).
            waits: records who waits for whom, if anybody does.
            rider: what else this rank says and hears; all ranks have one, or none.
        """
        self._group = group
        self._epoch = epoch
        self._waits, self._rider = waits, rider

    def exchange(self, state: RankState) -> GroupState:
        """One all-gather of [8] int64 a rank, and what rides along."""
        rider = self._rider
        row = torch.zeros(1, _NUM_FIELDS + (rider.width if rider else 0), dtype=torch.int64)
        row[0, _HAS_WORK] = int(state.num_tokens > 0)
        row[0, _NUM_TOKENS] = state.num_tokens
        row[0, _LEAVING] = int(state.leaving)
        row[0, _EPOCH] = self._epoch
        row[0, _IN_FLIGHT] = int(state.in_flight)
        row[0, _EXPERTS:_NUM_FIELDS] = torch.tensor(state.experts)
        if rider is not None:
            row[0, _NUM_FIELDS:] = torch.tensor(rider.say())
        rows = self._gather(row).tolist()
        epochs = [item[_EPOCH] for item in rows]
        if any(epoch != self._epoch for epoch in epochs):
            raise StaleTicketError(f"ranks of different lives meet: epochs {epochs}")
        has_work = any(item[_HAS_WORK] for item in rows)
        most = max(item[_NUM_TOKENS] for item in rows)
        if rider is not None:
            rider.hear([item[_NUM_FIELDS:] for item in rows], most)
        if self._waits is not None:
            self._waits.begin_step(has_work=has_work, num_tokens=state.num_tokens)
        return GroupState(
            has_work=has_work,
            max_num_tokens=most,
            mean_num_tokens=-(-sum(item[_NUM_TOKENS] for item in rows) // len(rows)),
            all_leaving=all(item[_LEAVING] for item in rows),
            in_flight=any(item[_IN_FLIGHT] for item in rows),
            any_leaving=any(item[_LEAVING] for item in rows),
            experts=conclude([_word_of(item) for item in rows]),
        )

    def _gather(self, row: torch.Tensor) -> torch.Tensor:
        if self._waits is None:
            return self._group.all_gather(row)
        self._waits.end_step()
        with self._waits.waiting(Phase.FIRST):
            return self._group.all_gather(row)


def _word_of(row: list[int]) -> Word:
    placement, turn, vote = row[_EXPERTS:_NUM_FIELDS]
    return Word(placement, turn, Vote(vote))


def create_lockstep(
    group: RankGroup,
    epoch: int,
    waits: WaitRecorder | None = None,
    *,
    rider: Rider | None = None,
) -> Lockstep:
    """The lockstep that fits the number of ranks; `waits` records who waits for whom."""
    if group.size == 1:
        return SoloLockstep(rider)
    return GroupLockstep(group, epoch, waits, rider=rider)


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
