"""The pool as one router process sees it: members, their load, who failed lately.

Announcements come whole and often, and mostly say that one member has another load: what did not
change costs nothing, and listeners are told what did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from router.pool.load import MergedLoad
from router.pool.members import Member, Role, WorkerKey, WorkerLoad
from router.pool.rates import TypicalSpeeds
from runtime.logging import get_logger

logger = get_logger(__name__)

FAILURE_COOLDOWN_S = 5.0


@dataclass(slots=True, eq=False)
class Candidate:
    """A member as a policy weighs it. Follows the pool: read it when it is needed."""

    member: Member
    load: MergedLoad
    whole: bool
    """Whether all endpoints of its instance, in this life, are in the pool."""
    typical: TypicalSpeeds = field(default_factory=TypicalSpeeds)
    """Of its role, for what was not measured here yet."""

    @property
    def num_requests(self) -> int:
        """Running and waiting, of all routers."""
        return self.load.num_requests

    @property
    def num_tokens(self) -> int:
        """Prompt tokens not computed yet."""
        return self.load.num_tokens

    @property
    def tokens_per_s(self) -> float:
        """While it works: prompt tokens of a prefill worker, output tokens of a decode rank."""
        return self.load.rates.tokens.per_s or self.typical.tokens_per_s

    @property
    def busy_share(self) -> float:
        """Of the last seconds, in which it worked; 0 to 1."""
        return min(1.0, self.load.rates.busy.per_s_of_long)

    @property
    def requests_per_s(self) -> float:
        """That end at a decode rank."""
        return self.load.rates.requests.per_s or self.typical.requests_per_s

    @property
    def queue_s(self) -> float:
        """Until a prefill worker has computed all that waits there."""
        return self.load.num_tokens_left / self.tokens_per_s

    def queue_ahead_s(self, order: int) -> float:
        """Until it gets to a prompt of this tier that comes now."""
        return self.load.num_tokens_ahead(order) / self.tokens_per_s

    def received_per_s(self, prefill: Member) -> float:
        """Bytes of KV per second that come to a decode rank from all parts of ``prefill``."""
        instance, _, rank = prefill.key
        peers = [f"{instance}/{rank + part}" for part in range(prefill.num_parts)]
        return self.load.rates.received_per_s(peers) or self.typical.received_per_s


class InFlight:
    """One request at a member, while it is entered."""

    __slots__ = ("_key", "_load", "_num_tokens", "_pool")

    def __init__(self, pool: PoolView, key: WorkerKey, num_tokens: int) -> None:
        self._pool = pool
        self._key = key
        self._num_tokens = num_tokens

    def __enter__(self) -> None:
        self._load = self._pool.enter(self._key, self._num_tokens)

    def __exit__(self, *_: object) -> None:
        self._pool.leave(self._key, self._num_tokens, self._load)


class PoolView:
    """Members by key. One event loop owns it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._announced: list[Member] = []
        self._candidates: dict[WorkerKey, Candidate] = {}
        self._loads: dict[WorkerKey, MergedLoad] = {}
        """Of members, and of workers that left while requests of ours are there."""
        self._failed_until: dict[WorkerKey, float] = {}
        self._typical = {role: TypicalSpeeds() for role in Role}
        self._version = 0
        self._on_change: list[Callable[[], None]] = []
        self._on_load: list[Callable[[WorkerKey], None]] = []
        self._on_failure: list[Callable[[WorkerKey, str], None]] = []

    @property
    def version(self) -> int:
        """Grows with every change of membership or of a member, load excepted."""
        return self._version

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each change of membership or of a member, load excepted."""
        self._on_change.append(listener)

    def on_load(self, listener: Callable[[WorkerKey], None]) -> None:
        """Call ``listener`` with each member whose load has changed."""
        self._on_load.append(listener)

    def on_failure(self, listener: Callable[[WorkerKey, str], None]) -> None:
        """Call ``listener`` with each member that is avoided from now on, and why."""
        self._on_failure.append(listener)

    def update(self, members: Sequence[Member]) -> None:
        """Replace the pool by ``members``."""
        before, self._announced = self._announced, list(members)
        pairs = zip(before, self._announced, strict=False)
        news = [(old, new) for old, new in pairs if old is not new]
        is_load_only = len(before) == len(members) and all(old == new for old, new in news)
        if not is_load_only:
            self._rebuild(members)
        for member in [new for _, new in news] if is_load_only else members:
            self._candidates[member.key].member = member
            self.report(member.key, member.load)
        if not is_load_only:
            self._version += 1
            for listener in self._on_change:
                listener()

    def report(self, key: WorkerKey, load: WorkerLoad) -> None:
        """Fresher load of one member, from its frames."""
        candidate = self._candidates.get(key)
        if candidate is None:
            return
        is_news = candidate.load.apply(load)
        if load.clock_s:
            candidate.typical.observe(candidate.load.rates)
        if is_news:
            self._tell_load(key)

    def members(self, role: Role | None = None) -> list[Member]:
        """All members, or those of one role; with the load of their last announcement."""
        return [m for m in self._announced if role is None or m.role is role]

    def member(self, key: WorkerKey) -> Member | None:
        """One member; None where it is gone."""
        candidate = self._candidates.get(key)
        return None if candidate is None else candidate.member

    def reported_load(self, key: WorkerKey) -> WorkerLoad:
        """What a member said last, whichever way."""
        load = self._loads.get(key)
        return WorkerLoad() if load is None else load.report

    def candidates(self, role: Role) -> list[Candidate]:
        """The members of ``role`` as a policy weighs them."""
        return [c for c in self._candidates.values() if c.member.role is role]

    def mark_failed(self, key: WorkerKey, reason: str) -> None:
        """Avoid this member for a moment, as long as another can do its work.

        And the others of its instance: ranks end together, some a little later.
        """
        if key in self._candidates:
            logger.warning("avoiding a worker for a moment worker=%s reason=%r", key, reason)
            until = self._clock() + FAILURE_COOLDOWN_S
            ranks = [other for other in self._candidates if other.life == key.life]
            self._failed_until.update(dict.fromkeys(ranks, until))
            for listener in self._on_failure:
                listener(key, reason)

    def recently_failed(self, key: WorkerKey) -> bool:
        """Whether ``mark_failed`` was called a moment ago."""
        return self._failed_until.get(key, 0.0) > self._clock()

    def failing(self) -> Collection[WorkerKey]:
        """All members of which that is true."""
        if self._failed_until:
            now = self._clock()
            self._failed_until = {k: t for k, t in self._failed_until.items() if t > now}
        return self._failed_until.keys()

    def num_in_flight(self, key: WorkerKey) -> int:
        """Requests that this process has at one member."""
        load = self._loads.get(key)
        return load.num_ours if load is not None else 0

    def in_flight(self, key: WorkerKey, num_tokens: int = 0) -> InFlight:
        """Count one request (and its prompt tokens) at a member, while it is entered."""
        return InFlight(self, key, num_tokens)

    def enter(self, key: WorkerKey, num_tokens: int) -> MergedLoad:
        """The same; the result is given back to ``leave``."""
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = MergedLoad()
        load.enter(num_tokens)
        self._tell_load(key)
        return load

    def leave(self, key: WorkerKey, num_tokens: int, load: MergedLoad) -> None:
        """What ``enter`` counted is over."""
        load.leave(num_tokens)
        self._tell_load(key)
        if load.num_ours == 0 and key not in self._candidates:
            self._loads.pop(key, None)

    def _rebuild(self, members: Sequence[Member]) -> None:
        present = {member.key for member in members}
        for key in self._loads.keys() - present:
            if self._loads[key].num_ours == 0:
                del self._loads[key]
        self._failed_until = {k: t for k, t in self._failed_until.items() if k in present}
        num_present = Counter((member.role, member.key.life) for member in members)
        self._candidates = {
            member.key: Candidate(
                member,
                self._loads.setdefault(member.key, MergedLoad()),
                num_present[member.role, member.key.life] >= member.num_endpoints,
                self._typical[member.role],
            )
            for member in members
        }

    def _tell_load(self, key: WorkerKey) -> None:
        for listener in self._on_load:
            listener(key)
