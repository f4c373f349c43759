"""The registry of workers: who is in the pool, by lease. Pure: no sockets, the clock is handed in.

A worker is in the pool from its registration until its lease runs out, it leaves, or a later life
of the same (instance, rank) registers. Each change gives the pool a new version; watchers get the
whole pool.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from router.pool.lease_clock import LeaseClock
from router.pool.members import Departure, DepartureReason, Member, WorkerKey, WorkerLoad

MAX_REPLACED = 1024
"""Lives that are remembered as replaced."""
MAX_DEPARTURES = 128
"""That are told to watchers: more than the ranks of one instance that ends."""
REFUSED_S = 600.0
"""A worker that was refused is remembered for so long, or until its place is taken."""
MAX_REFUSED = 64


class SupersededError(ValueError):
    """The place belongs to a later life of it."""


@dataclass(slots=True)
class _Lease:
    member: Member
    expires_at: float


class Registry:
    """Leases of workers of some models. One event loop owns it and calls ``tick``."""

    def __init__(self, models: Collection[str], ttl_s: float, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds that never go back; ``ttl_s``: the life of an unrenewed lease."""
        self._models = tuple(models)
        self._ttl_s = ttl_s
        self._clock = LeaseClock(clock, min(0.25, ttl_s / 8))
        self._leases: dict[str, _Lease] = {}
        self._replaced: dict[WorkerKey, None] = {}
        """Oldest first."""
        self._departures: deque[Departure] = deque(maxlen=MAX_DEPARTURES)
        self._num_departures = 0
        self._refused: dict[tuple[str, int], tuple[str, float]] = {}
        """Why, and until when it is told, by place; the latest last."""
        self._version = 1

    @property
    def version(self) -> int:
        """Grows with every change of membership, state or load."""
        return self._version

    @property
    def ttl_s(self) -> float:
        """Seconds from a registration or renewal to its end."""
        return self._ttl_s

    @property
    def tick_interval_s(self) -> float:
        """``tick`` is to be called this often."""
        return self._clock.interval_s

    def members(self) -> list[Member]:
        """The pool as it is now, leases that ran out excluded."""
        self.expire()
        return [lease.member for lease in self._leases.values()]

    def departures(self) -> Sequence[Departure]:
        """The last workers that went, oldest first."""
        return tuple(self._departures)

    def refused(self) -> list[str]:
        """Workers that asked lately and are not members, each with why; the latest last."""
        return [reason for reason, _ in self._refused.values()]

    def note_refused(self, instance: str, rank: int, reason: str) -> None:
        """A worker asks in vain; the same again is no news."""
        place = instance, rank
        former, _ = self._refused.pop(place, ("", 0.0))
        self._refused[place] = reason, self._clock.now() + REFUSED_S
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._version += reason != former

    def register(self, member: Member) -> str:
        """Add ``member`` and return its lease id; an earlier life of the same endpoint leaves.

        Raises:
            SupersededError: a later life of the same endpoint is in the pool.
            ValueError: it serves another model than these pools; or its name is that of a worker
                of another model.
        """
        if member.model not in self._models:
            served = ", ".join(map(repr, self._models))
            raise ValueError(
                f"model = {member.model!r}: this router serves {served}. Fix: give router and "
                "workers the same model.name, or name the model in router.models_file"
            )
        self.expire()
        self._refuse_the_name_of_another_model(member)
        for lease_id, lease in list(self._leases.items()):
            if lease.member.key.place == member.key.place:
                self._refuse_an_earlier_life(member, lease.member)
                del self._leases[lease_id]
                if lease.member.key != member.key:
                    self._remember_replaced(lease.member.key)
                    self._note_departure(lease.member.key, DepartureReason.REPLACED)
        lease_id = secrets.token_hex(12)
        self._leases[lease_id] = _Lease(member, self._clock.now() + self._ttl_s)
        self._refused.pop(member.key.place, None)
        self._version += 1
        return lease_id

    def renew(
        self, lease_id: str, load: WorkerLoad, *, draining: bool = False, num_routers: int = 0
    ) -> bool:
        """Extend a lease with fresh load; False where it is unknown: the worker registers again.

        Draining never ends: a worker that said so once stays so until it registers anew.
        """
        self.expire()
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.expires_at = self._clock.now() + self._ttl_s
        member = lease.member
        draining = draining or member.draining
        num_routers = num_routers or member.num_routers
        is_same = (draining, num_routers) == (member.draining, member.num_routers)
        is_news = not is_same or load != member.load
        # Where requests are there, watchers have to ask anew whose they are.
        if is_news or load.num_requests:
            lease.member = replace(member, load=load, draining=draining, num_routers=num_routers)
            self._version += 1
        return True

    def member_of(self, lease_id: str) -> Member | None:
        """Whose lease it is; None where it is unknown."""
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.member

    def deregister(self, lease_id: str) -> WorkerKey | None:
        """End a lease; None where it is unknown."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return None
        self._version += 1
        self._note_departure(lease.member.key, DepartureReason.LEFT)
        return lease.member.key

    def tick(self) -> float:
        """Let time pass; returns the seconds of a stall, by which all leases last longer."""
        return self._clock.tick()

    def expire(self) -> list[WorkerKey]:
        """Drop the leases that ran out and name their workers; forget who was refused long ago."""
        now = self._clock.now()
        gone = [lease_id for lease_id, lease in self._leases.items() if lease.expires_at <= now]
        keys = [self._leases.pop(lease_id).member.key for lease_id in gone]
        forgotten = [place for place, (_, until) in self._refused.items() if until <= now]
        for place in forgotten:
            del self._refused[place]
        self._version += bool(keys or forgotten)
        for key in keys:
            self._note_departure(key, DepartureReason.LOST)
        return keys

    def _refuse_the_name_of_another_model(self, member: Member) -> None:
        # Else two deployments that call their workers alike would take turns in one place.
        for lease in self._leases.values():
            other = lease.member
            if other.key.instance == member.key.instance and other.model != member.model:
                raise ValueError(
                    f"instance = {member.key.instance!r} is a worker of the model {other.model!r}. "
                    "Fix: another --instance (or, with Helm, another release name)"
                )

    def _refuse_an_earlier_life(self, member: Member, holder: Member) -> None:
        # Clocks of hosts differ, so what was seen to be replaced says more than when it started.
        is_earlier = member.key in self._replaced or 0 < member.started_ms < holder.started_ms
        if member.key != holder.key and is_earlier:
            raise SupersededError(
                f"worker {member.key}, epoch {member.key.epoch:016x}, pid {member.pid}: a later "
                f"life of it serves at {holder.address}, epoch {holder.key.epoch:016x}, pid "
                f"{holder.pid}. Fix: end the earlier one, or give each its own --instance"
            )

    def _note_departure(self, key: WorkerKey, reason: DepartureReason) -> None:
        self._num_departures += 1
        self._departures.append(Departure(self._num_departures, key, reason))

    def _remember_replaced(self, key: WorkerKey) -> None:
        self._replaced[key] = None
        while len(self._replaced) > MAX_REPLACED:
            del self._replaced[next(iter(self._replaced))]
