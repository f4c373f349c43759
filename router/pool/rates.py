"""How fast one worker is, measured from what it reports of itself.

Counters of one life grow; rates are their differences over those of the worker's own times, so that
neither clocks of hosts nor the way of a report matter. What was long ago counts less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.pool.members import WorkerLoad

HALF_LIFE_S = 30.0
"""Of busy time: what was measured before counts half."""
BUSY_HALF_LIFE_S = 5.0
"""Of what says how much a worker works just now."""
MIN_S = 0.01
"""Of busy time, below which nothing is said."""


@dataclass(slots=True)
class Rate:
    """Something over seconds, of which the latest count most."""

    amount: float = 0.0
    seconds: float = 0.0
    half_life_s: float = HALF_LIFE_S

    def add(self, amount: float, seconds: float) -> None:
        """So much more in so many more seconds."""
        if amount < 0.0 or seconds <= 0.0:
            return
        keep = 0.5 ** (seconds / self.half_life_s)
        self.amount = keep * self.amount + amount
        self.seconds = keep * self.seconds + seconds

    @property
    def per_s_of_long(self) -> float:
        """As if nothing had been before, for half a life at least: a burst alone is no rate."""
        return self.amount / max(self.seconds, self.half_life_s / 2) if self.seconds else 0.0

    @property
    def per_s(self) -> float:
        """0 where too little is known."""
        return self.amount / self.seconds if self.seconds >= MIN_S else 0.0


@dataclass(slots=True)
class MeasuredRates:
    """Of one life of one worker."""

    tokens: Rate = field(default_factory=Rate)
    """Prompt tokens computed, or output tokens sampled, in busy seconds."""
    steps: Rate = field(default_factory=Rate)
    busy: Rate = field(default_factory=lambda: Rate(half_life_s=BUSY_HALF_LIFE_S))
    """Busy seconds, in seconds of its clock: the share of the time in which it works."""
    requests: Rate = field(default_factory=Rate)
    """That ended, of a decode rank, in seconds of its clock."""
    received: dict[str, Rate] = field(default_factory=dict)
    """Bytes of KV by sending endpoint, in seconds on their way."""
    _last: WorkerLoad | None = None

    def observe(self, load: WorkerLoad) -> None:
        """Take a report; one without a clock, or older than the last, says nothing."""
        last = self._last
        if not load.clock_s or (last is not None and load.clock_s <= last.clock_s):
            return
        self._last = load
        if last is None:
            return
        busy_s = load.busy_s - last.busy_s
        self.tokens.add(load.num_tokens_done - last.num_tokens_done, busy_s)
        self.steps.add(load.num_steps_done - last.num_steps_done, busy_s)
        self.busy.add(busy_s, load.clock_s - last.clock_s)
        ended = load.num_requests_done - last.num_requests_done
        self.requests.add(ended, load.clock_s - last.clock_s)
        if load.received != last.received:
            self._observe_received(last, load)

    def received_per_s(self, peers: Sequence[str]) -> float:
        """Bytes per second from these endpoints at once; 0 where nothing came from one of them."""
        rates = [self.received[peer].per_s if peer in self.received else 0.0 for peer in peers]
        return sum(rates) if all(rates) else 0.0

    def _observe_received(self, last: WorkerLoad, load: WorkerLoad) -> None:
        before, before_s, now_s = dict(last.received), dict(last.received_s), dict(load.received_s)
        for peer, num_bytes in load.received:
            rate = self.received.setdefault(peer, Rate())
            seconds = now_s.get(peer, 0.0) - before_s.get(peer, 0.0)
            rate.add(num_bytes - before.get(peer, 0), seconds)
        for peer in self.received.keys() - now_s.keys():
            del self.received[peer]


ASSUMED_TOKENS_PER_S = 20_000.0
ASSUMED_RECEIVED_PER_S = 20e9
ASSUMED_REQUESTS_PER_S = 1.0
SHARE = 0.05
"""Of the latest worker heard of in what is typical."""


@dataclass(slots=True)
class TypicalSpeeds:
    """Of the workers of a role, for one that has not said enough of itself yet."""

    tokens_per_s: float = ASSUMED_TOKENS_PER_S
    received_per_s: float = ASSUMED_RECEIVED_PER_S
    requests_per_s: float = ASSUMED_REQUESTS_PER_S
    _is_measured: bool = False

    def observe(self, rates: MeasuredRates) -> None:
        """One worker has reported."""
        share = SHARE if self._is_measured else 1.0
        if tokens := rates.tokens.per_s:
            self.tokens_per_s += share * (tokens - self.tokens_per_s)
            self._is_measured = True
        if ended := rates.requests.per_s:
            self.requests_per_s += share * (ended - self.requests_per_s)
        paths = [rate.per_s for rate in rates.received.values() if rate.per_s]
        if paths:
            mean = sum(paths) / len(paths)
            self.received_per_s += share * (mean - self.received_per_s)
