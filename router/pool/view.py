"""The pool as one router process sees it: members, load, what we sent them, who failed lately.

A worker's own report is always a little old, and ours of what we sent it is exact. The load of a
member is therefore our in-flight count plus what others had there when it last reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from router.pool.members import Member, Role, WorkerKey, WorkerLoad
from runtime.logging import get_logger

logger = get_logger(__name__)

FAILURE_COOLDOWN_S = 5.0


@dataclass(slots=True)
class _Ours:
    """What this process has at one member, and what others had there at its last report."""

    num_requests: int = 0
    num_tokens: int = 0
    others_requests: int = 0
    others_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A member with its load as a policy weighs it."""

    member: Member
    num_requests: int
    """Running and waiting, of all routers."""
    num_tokens: int
    """Prompt tokens not computed yet."""
    recently_failed: bool
    whole: bool
    """Whether all endpoints of its instance, in this life, are in the pool."""


class PoolView:
    """Members by key. One event loop owns it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._members: dict[WorkerKey, Member] = {}
        self._ours: dict[WorkerKey, _Ours] = {}
        self._failed_until: dict[WorkerKey, float] = {}
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each change of membership."""
        self._listeners.append(listener)

    def update(self, members: Sequence[Member]) -> None:
        """Replace the pool by ``members``."""
        before = self._members.keys()
        self._members = {member.key: member for member in members}
        for key, member in self._members.items():
            self._note_others(key, member.load)
        for key in self._ours.keys() - self._members.keys():
            if self._ours[key].num_requests == 0:
                del self._ours[key]
        self._failed_until = {k: t for k, t in self._failed_until.items() if k in self._members}
        if before != self._members.keys():
            for listener in self._listeners:
                listener()

    def report(self, key: WorkerKey, load: WorkerLoad) -> None:
        """Fresher load of one member, from its frames."""
        member = self._members.get(key)
        if member is not None:
            self._members[key] = replace(member, load=load)
            self._note_others(key, load)

    def members(self, role: Role | None = None) -> list[Member]:
        """All members, or those of one role."""
        return [m for m in self._members.values() if role is None or m.role is role]

    def member(self, key: WorkerKey) -> Member | None:
        """One member; None where it is gone."""
        return self._members.get(key)

    def candidates(self, role: Role) -> list[Candidate]:
        """The members of ``role`` as a policy weighs them."""
        now = self._clock()
        members = self.members(role)
        num_present = Counter(member.key.life for member in members)
        found = []
        for member in members:
            ours = self._ours.get(member.key) or _Ours()
            found.append(
                Candidate(
                    member=member,
                    num_requests=ours.num_requests + ours.others_requests,
                    num_tokens=ours.num_tokens + ours.others_tokens,
                    recently_failed=self._failed_until.get(member.key, 0.0) > now,
                    whole=num_present[member.key.life] >= member.num_endpoints,
                )
            )
        return found

    def mark_failed(self, key: WorkerKey, reason: str) -> None:
        """Avoid this member for a moment, as long as another can do its work.

        And the others of its instance: ranks end together, some a little later.
        """
        if key in self._members:
            logger.warning("avoiding a worker for a moment worker=%s reason=%r", key, reason)
            until = self._clock() + FAILURE_COOLDOWN_S
            ranks = [other for other in self._members if other.life == key.life]
            self._failed_until.update(dict.fromkeys(ranks, until))

    def recently_failed(self, key: WorkerKey) -> bool:
        """Whether ``mark_failed`` was called a moment ago."""
        return self._failed_until.get(key, 0.0) > self._clock()

    def num_in_flight(self, key: WorkerKey) -> int:
        """Requests that this process has at one member."""
        ours = self._ours.get(key)
        return ours.num_requests if ours is not None else 0

    @contextmanager
    def in_flight(self, key: WorkerKey, num_tokens: int = 0) -> Iterator[None]:
        """Count one request (and its prompt tokens) at a member."""
        ours = self._ours.setdefault(key, _Ours())
        ours.num_requests += 1
        ours.num_tokens += num_tokens
        try:
            yield
        finally:
            ours.num_requests -= 1
            ours.num_tokens -= num_tokens
            if ours.num_requests == 0 and key not in self._members:
                self._ours.pop(key, None)

    def _note_others(self, key: WorkerKey, load: WorkerLoad) -> None:
        ours = self._ours.setdefault(key, _Ours())
        ours.others_requests = max(0, load.num_requests - ours.num_requests)
        ours.others_tokens = max(0, load.num_tokens_waiting - ours.num_tokens)
