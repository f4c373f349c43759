"""What has happened in the pool lately: who joined, drained, left, was lost, started again, failed.

A view of the pool knows how it is; this remembers how it came to be so, for people to read. Both
lists are bounded. Ranks of one instance mostly do the same together, and are one event.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from router.pool.members import Departure, DepartureReason, Member, Role, WorkerKey

MAX_EVENTS = 128
TOGETHER_S = 5.0
"""Ranks that do the same within so long are told of in one event."""
LOOK_BACK = 8
"""Events that a rank may belong to: several instances may start at once."""
LOST_S = 600.0
"""A lost worker is remembered for so long, or until its place is taken again."""
MAX_LOST = 256


class EventKind(enum.Enum):
    """What a worker did, or what was done to it."""

    JOINED = "joined"
    DRAINING = "draining"
    LEFT = "left"
    LOST = "lost"
    RESTARTED = "restarted"
    FAILING = "failing"


_KIND_OF = {
    DepartureReason.LEFT: EventKind.LEFT,
    DepartureReason.LOST: EventKind.LOST,
    DepartureReason.REPLACED: EventKind.RESTARTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent:
    """Of some ranks of one life of an instance."""

    at: float
    """Wall clock of this router, of the first of them."""
    kind: EventKind
    role: Role
    instance: str
    epoch: int
    ranks: tuple[int, ...]
    text: str = ""
    """Why, where somebody said so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWorker:
    """One whose lease ran out."""

    member: Member
    at: float


class PoolJournal:
    """Of one router process. One event loop owns it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` is the wall clock."""
        self._clock = clock
        self._known: dict[WorkerKey, Member] = {}
        self._events: deque[PoolEvent] = deque(maxlen=MAX_EVENTS)
        self._lost: dict[tuple[str, int], LostWorker] = {}
        self._last_departure = 0

    def events(self) -> list[PoolEvent]:
        """The last of them, oldest first."""
        return list(self._events)

    def lost(self) -> list[LostWorker]:
        """Workers that nobody has replaced yet."""
        oldest = self._clock() - LOST_S
        self._lost = {place: lost for place, lost in self._lost.items() if lost.at > oldest}
        return list(self._lost.values())

    def observe(self, members: Sequence[Member], departures: Sequence[Departure]) -> None:
        """The pool is so now; ``departures`` are the last that its registry knows of."""
        present = {member.key: member for member in members}
        reasons = {gone.key: gone.reason for gone in departures if self._is_new(gone)}
        if departures:
            self._last_departure = departures[-1].number
        for key, member in self._known.items():
            if key not in present:
                # Where the registry has forgotten why, silence is all that is known.
                self._note_gone(member, reasons.get(key, DepartureReason.LOST))
        for key, member in present.items():
            former = self._known.get(key)
            if former is None:
                self._lost.pop(key.place, None)
                self._add(EventKind.JOINED, member)
            if member.draining and not (former is not None and former.draining):
                self._add(EventKind.DRAINING, member)
        self._known = present

    def note_failure(self, key: WorkerKey, reason: str) -> None:
        """A worker is avoided for a moment."""
        member = self._known.get(key)
        if member is not None:
            self._add(EventKind.FAILING, member, reason)

    def _is_new(self, departure: Departure) -> bool:
        # A registry that was started anew counts from 1 again.
        return departure.number > self._last_departure or departure.key in self._known

    def _note_gone(self, member: Member, reason: DepartureReason) -> None:
        self._add(_KIND_OF[reason], member)
        if reason is DepartureReason.LOST:
            self._lost[member.key.place] = LostWorker(member=member, at=self._clock())
            if len(self._lost) > MAX_LOST:
                del self._lost[next(iter(self._lost))]

    def _add(self, kind: EventKind, member: Member, text: str = "") -> None:
        now, (instance, epoch, rank) = self._clock(), member.key
        for number in range(1, 1 + min(LOOK_BACK, len(self._events))):
            event = self._events[-number]
            if (event.kind, event.instance, event.epoch) != (kind, instance, epoch):
                continue
            if now - event.at > TOGETHER_S:
                break
            if rank not in event.ranks:
                ranks = tuple(sorted((*event.ranks, rank)))
                self._events[-number] = replace(event, ranks=ranks)
            return
        self._events.append(
            PoolEvent(
                at=now,
                kind=kind,
                role=member.role,
                instance=instance,
                epoch=epoch,
                ranks=(rank,),
                text=text,
            )
        )
