"""The registry of workers: who is in the pool, by lease. Pure: no sockets, the clock is handed in.

A worker is in the pool from its registration until its lease runs out, it leaves, or another life
of the same (instance, rank) registers. Each change gives the pool a new version; watchers get the
whole pool.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from router.pool.members import Member, WorkerKey, WorkerLoad


@dataclass(slots=True)
class _Lease:
    member: Member
    expires_at: float


class Registry:
    """Leases of workers of one model. Not thread-safe: one event loop owns it."""

    def __init__(self, model: str, ttl_s: float, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds that never go back; ``ttl_s``: the life of an unrenewed lease."""
        self._model = model
        self._ttl_s = ttl_s
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._version = 1

    @property
    def version(self) -> int:
        """Grows with every change of membership, state or load."""
        return self._version

    @property
    def ttl_s(self) -> float:
        """Seconds from a registration or renewal to its end."""
        return self._ttl_s

    def members(self) -> list[Member]:
        """The pool as it is now, leases that ran out excluded."""
        self.expire()
        return [lease.member for lease in self._leases.values()]

    def register(self, member: Member) -> str:
        """Add ``member`` and return its lease id; an earlier life of the same endpoint leaves.

        Raises:
            ValueError: it serves another model than this pool.
        """
        if member.model != self._model:
            raise ValueError(
                f"model = {member.model!r}: this pool serves {self._model!r}. "
                "Fix: give router and workers the same model.name"
            )
        self.expire()
        place = (member.key.instance, member.key.rank)
        for lease_id, lease in list(self._leases.items()):
            if (lease.member.key.instance, lease.member.key.rank) == place:
                del self._leases[lease_id]
        lease_id = secrets.token_hex(12)
        self._leases[lease_id] = _Lease(member, self._clock() + self._ttl_s)
        self._version += 1
        return lease_id

    def renew(self, lease_id: str, load: WorkerLoad, *, draining: bool = False) -> bool:
        """Extend a lease with fresh load; False where it is unknown: the worker registers again.

        Draining never ends: a worker that said so once stays so until it registers anew.
        """
        self.expire()
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.expires_at = self._clock() + self._ttl_s
        draining = draining or lease.member.draining
        changed = replace(lease.member, load=load, draining=draining)
        if changed != lease.member:
            lease.member = changed
            self._version += 1
        return True

    def deregister(self, lease_id: str) -> WorkerKey | None:
        """End a lease; None where it is unknown."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return None
        self._version += 1
        return lease.member.key

    def expire(self) -> list[WorkerKey]:
        """Drop the leases that ran out and name their workers."""
        now = self._clock()
        gone = [lease_id for lease_id, lease in self._leases.items() if lease.expires_at <= now]
        keys = [self._leases.pop(lease_id).member.key for lease_id in gone]
        self._version += bool(keys)
        return keys
