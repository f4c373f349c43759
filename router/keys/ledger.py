"""What each key has used of its limits: its buckets, and its requests that have not ended.

One a router: with several HTTP processes it lives in the control process, and they ask it
(`service`). Limits come with each request, so that it holds no keys and follows a changed file by
itself. What a request will cost is guessed when it comes; what it turns out to cost beyond that is
spent while it runs, and the guess is corrected when it has ended. Seconds of the router's CPU are
paid in requests: one has a second of it for its texts, and one for its grammars.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from router.keys.bucket import TokenBucket
from router.keys.record import LEAST_OUTPUT, KeyLimits

CONCURRENCY_RETRY_S = 1.0
"""Nobody knows when a request of the same key ends."""
CPU_S_OF_REQUEST = 1.0
"""Seconds of CPU that are in the price of a request, each time that it needs some; each further one
costs as much as a request."""
_WEIGHT = 0.1
"""Of the last request in what is usual."""


class LimitKind(enum.Enum):
    """Which limit refused a request; the values are labels of metrics."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENCY = "max_concurrent_requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One bucket, as a client is told of it."""

    limit: int
    remaining: int
    reset_s: float
    """Until it is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a request may begin."""

    refused_by: LimitKind | None = None
    retry_after_s: float = 0.0
    """Where it was refused: when it would be let in, if nothing else came meanwhile."""
    requests: Level | None = None
    """None: the key has no such limit; so ``tokens``."""
    tokens: Level | None = None
    num_tokens: int = 0
    """That were taken, where it was let in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What one request is taken for."""

    name: str
    """Of its key."""
    holder: str
    """The process that serves it."""
    num_tokens: int
    """Of its prompt, and the most that it asks for; 0: it asks for none."""
    num_open: int = 0
    """Choices of which it does not say how long they may be: each is what is usual for the key."""


class Ledger(Protocol):
    """Whoever lets requests of keys in."""

    async def admit(self, charge: Charge, limits: KeyLimits) -> Verdict:
        """Take a request and its tokens, or nothing where a limit refuses them."""
        ...

    def spend(self, name: str, *, num_tokens: int = 0, num_requests: float = 0.0) -> None:
        """The key ``name`` has used more than its requests were taken for; does not wait."""
        ...

    def settle(self, charge: Charge, num_taken: int, num_tokens: int, num_output: int) -> None:
        """A request that was let in has ended; does not wait.

        ``num_taken`` tokens were taken for it so far, and it has cost ``num_tokens``, of which
        ``num_output`` are of its answer.
        """
        ...


class _Account:
    """What one key has used."""

    def __init__(self) -> None:
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.usual_output = float(LEAST_OUTPUT)
        """Tokens of a choice that might have been as long as it liked."""
        self.running: Counter[str] = Counter()
        """Requests that have not ended, by holder."""

    def follow(self, limits: KeyLimits, now: float) -> None:
        self.requests = _resized(self.requests, limits.requests_per_minute, now)
        self.tokens = _resized(self.tokens, limits.tokens_per_minute, now)


class KeyLedger:
    """The ledger itself. One event loop owns it; it has at most as many accounts as names came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` never goes back, and counts seconds."""
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    async def admit(self, charge: Charge, limits: KeyLimits) -> Verdict:
        """As ``Ledger`` says; never waits."""
        return self.decide(charge, limits)

    def decide(self, charge: Charge, limits: KeyLimits) -> Verdict:
        """Take a request and its tokens, or nothing where a limit refuses them.

        A request that is taken for more than all that a full bucket holds is let in when it is
        full, and overdraws it.
        """
        now = self._clock()
        account = self._accounts.setdefault(charge.name, _Account())
        account.follow(limits, now)
        num_tokens = charge.num_tokens + charge.num_open * math.ceil(account.usual_output)
        waits = {
            LimitKind.REQUESTS: _wait_s(account.requests, 1, now),
            LimitKind.TOKENS: _wait_s(account.tokens, num_tokens, now),
        }
        if 0 < limits.most_at_once <= account.running.total():
            waits[LimitKind.CONCURRENCY] = CONCURRENCY_RETRY_S
        slowest = max(waits, key=lambda kind: waits[kind])
        is_refused = waits[slowest] > 0
        if not is_refused:
            account.running[charge.holder] += 1
            _take(account.requests, 1, now)
            _take(account.tokens, num_tokens, now)
        return Verdict(
            refused_by=slowest if is_refused else None,
            retry_after_s=waits[slowest],
            requests=_level_of(account.requests, now),
            tokens=_level_of(account.tokens, now),
            num_tokens=0 if is_refused else num_tokens,
        )

    def spend(self, name: str, *, num_tokens: int = 0, num_requests: float = 0.0) -> None:
        """As ``Ledger`` says; what is overdrawn keeps the next request waiting."""
        account, now = self._accounts.get(name), self._clock()
        if account is not None:
            _take(account.tokens, num_tokens, now)
            _take(account.requests, num_requests, now)

    def settle(self, charge: Charge, num_taken: int, num_tokens: int, num_output: int) -> None:
        """As ``Ledger`` says."""
        account = self._accounts.get(charge.name)
        if account is None or not account.running[charge.holder]:
            return  # its holder was forgotten meanwhile
        account.running[charge.holder] -= 1
        _take(account.tokens, num_tokens - num_taken, self._clock())
        if charge.num_open:
            usual = account.usual_output
            usual += _WEIGHT * (num_output / charge.num_open - usual)
            account.usual_output = max(LEAST_OUTPUT, usual)

    def forget(self, holder: str) -> None:
        """The process ``holder`` has ended, and its requests with it; what was taken stays so."""
        for account in self._accounts.values():
            account.running.pop(holder, None)

    def num_running(self, name: str) -> int:
        """Requests of a key that have not ended."""
        account = self._accounts.get(name)
        return 0 if account is None else account.running.total()


def _resized(bucket: TokenBucket | None, capacity: int, now: float) -> TokenBucket | None:
    if capacity == 0:
        return None
    if bucket is None:
        return TokenBucket(capacity, now)
    if bucket.capacity != capacity:
        bucket.resize(capacity, now)
    return bucket


def _wait_s(bucket: TokenBucket | None, amount: int, now: float) -> float:
    """Whoever takes nothing waits for no debt of others."""
    return 0.0 if bucket is None or amount == 0 else bucket.wait_s(amount, now)


def _take(bucket: TokenBucket | None, amount: float, now: float) -> None:
    if bucket is not None:
        bucket.take(amount, now)


def _level_of(bucket: TokenBucket | None, now: float) -> Level | None:
    if bucket is None:
        return None
    return Level(
        limit=bucket.capacity,
        remaining=max(0, math.floor(bucket.level(now))),
        reset_s=bucket.wait_s(bucket.capacity, now),
    )
