"""Ranks that are threads and have a clock each, which goes on only as they say.

So what ranks record can be compared with what was arranged, to the microsecond and however slow
the machine is. A rank's flag carries its own time; who receives it moves its clock on to where it
would have seen it.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from engine.parallel.lockstep import GroupLockstep, RankState
from engine.parallel.wait_recorder import WaitRecorder
from runtime.stragglers.rank_waits import BLOCKS_OF_WINDOW, STEPS_OF_BLOCK, Phase, RankBlock
from tests.engine.parallel.thread_ranks import Meetings, run_ranks, thread_groups

NUM_LAYERS = 2
GAP_S, ATTENTION_S, EXPERTS_S, LINK_S = 1e-3, 60e-6, 50e-6, 8e-6
NUM_STEPS = BLOCKS_OF_WINDOW * STEPS_OF_BLOCK + 2
"""100 that count: none is before the first, and the last is not followed by a meeting."""


class VirtualFlags:
    """See `RankFlags`; `clock` is the rank's."""

    def __init__(self, rank: int, meetings: Meetings, links: Mapping[tuple[int, int], float]):
        self._rank, self._meetings, self._links = rank, meetings, links
        self._number = -1
        self.now = 100.0 * rank  # clocks of different ranks are far apart
        self._apart = [100.0 * other for other in range(meetings.num_ranks)]

    def clock(self) -> float:
        return self.now

    def send(self) -> None:
        ours = self.now - self._apart[self._rank]
        self._number = self._meetings.leave("flags", self._rank, "flag", ours)

    def receive(self, arrived: Callable[[int], None]) -> None:
        sent = self._meetings.collect("flags", self._number)
        seen = {
            source: time + self._links.get((self._rank, source), LINK_S) + self._apart[self._rank]
            for source, time in enumerate(sent)
            if source != self._rank
        }
        for source in sorted(seen, key=seen.__getitem__):
            self.now = max(self.now, seen[source])
            arrived(source)

    def close(self) -> None:
        pass


class VirtualRank:
    """What a rank does in a step; a test changes the times."""

    def __init__(self, waits: WaitRecorder, flags: VirtualFlags, lockstep: GroupLockstep) -> None:
        self.waits, self.flags, self.lockstep = waits, flags, lockstep
        self.gap_s, self.attention_s, self.rows = GAP_S, ATTENTION_S, 1.0

    def step(self) -> None:
        """Meet, and run all layers."""
        self.flags.now += self.gap_s
        self.lockstep.exchange(RankState(num_tokens=128))
        for _ in range(NUM_LAYERS):
            self.flags.now += self.attention_s
            with self._waiting(Phase.DISPATCH):
                pass
            self.waits.received(int(1000 * self.rows))
            self.flags.now += EXPERTS_S * self.rows
            self.waits.announce()
            with self.waits.waiting(Phase.COMBINE, is_announced=True):
                pass

    def _waiting(self, phase: Phase) -> AbstractContextManager[None]:
        return self.waits.waiting(phase)


def record(
    num_ranks: int,
    arrange: Callable[[int, VirtualRank], None],
    links: Mapping[tuple[int, int], float] | None = None,
    each_step: Callable[[int, int, VirtualRank], None] = lambda rank, step, self: None,
) -> dict[int, tuple[RankBlock, ...]]:
    """Run steps on threads, and return what every rank recorded.

    Args:
        num_ranks: R.
        arrange: makes a rank what it is.
        links: seconds by (receiver, source), where they are not the usual.
        each_step: called before every step.
    """

    def body(rank: int, meetings: Meetings) -> tuple[RankBlock, ...]:
        flags = VirtualFlags(rank, meetings, links or {})
        waits = WaitRecorder(num_ranks, flags, flags.clock)
        group = thread_groups(rank, meetings).ep_group
        played = VirtualRank(waits, flags, GroupLockstep(group, 7, waits))
        arrange(rank, played)
        for step in range(NUM_STEPS):
            each_step(rank, step, played)
            played.step()
        return waits.blocks

    return dict(enumerate(run_ranks(num_ranks, body)))
