"""Rates of workers, from the counters in their renewals: tokens, steps, bytes of KV by pair.

A renewal carries the worker's own clock, so a rate does not depend on when its report arrived. What
has not changed is not announced: that a worker has no news for longer than a renewal takes says
that its counters stand still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from router.pool.members import DraftTotals, Member, WorkerKey, WorkerLoad

SPAN_S = 30.0
"""Rates are over at least so long, as far as there are reports: work comes in bursts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRates:
    """Of the drafts that steps verified in the same time."""

    drafts: float = 0.0
    """A second."""
    accept_length: float | None = None
    """Tokens of a step that verified drafts of a request, in the mean; None where none did."""
    acceptance: tuple[float, ...] = ()
    """Share that became output, by position, as far as there were drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRates:
    """Each a second."""

    tokens: float = 0.0
    steps: float = 0.0
    received: dict[str, float] = field(default_factory=dict)
    """Bytes of KV by the endpoint that sends them."""
    drafts: DraftRates = field(default_factory=DraftRates)


IDLE = WorkerRates()


@dataclass(slots=True)
class _Reports:
    told: WorkerLoad
    """The latest."""
    seen_at: float
    loads: deque[WorkerLoad]
    """Of the time of a rate, oldest first; silence stands among them as reports without change."""

    def add(self, load: WorkerLoad, now: float) -> None:
        self.loads.append(load)
        self.seen_at = now
        if self.loads[0].clock_s <= 0.0:  # told before there was a clock
            self.loads.popleft()
        while len(self.loads) > 2 and load.clock_s - self.loads[1].clock_s >= SPAN_S:
            self.loads.popleft()


class RateMeter:
    """Follows the counters of all members. One event loop owns it."""

    def __init__(self, lease_ttl_s: float) -> None:
        """``lease_ttl_s``: renewals come three times as often."""
        self._interval_s = lease_ttl_s / 3
        self._silent_s = max(2.0, lease_ttl_s)
        self._reports: dict[WorkerKey, _Reports] = {}

    def observe(self, members: Iterable[Member], now: float) -> None:
        """Take in what members have told since the last time; ``now`` is monotonic."""
        former, self._reports = self._reports, {}
        for member in members:
            key, load = member.key, member.load
            reports = former.get(key)
            if reports is None:
                reports = _Reports(told=load, seen_at=now, loads=deque([load]))
            elif load is not reports.told and load.clock_s > reports.told.clock_s:
                _take(reports, load, now)
            elif load.clock_s > 0.0 and now - reports.seen_at > self._silent_s:
                self._note_silence(reports, now)
            self._reports[key] = reports

    def rates(self, key: WorkerKey) -> WorkerRates:
        """Of one member."""
        reports = self._reports.get(key)
        return IDLE if reports is None else _rates_between(reports.loads[0], reports.loads[-1])

    def _note_silence(self, reports: _Reports, now: float) -> None:
        """Until a renewal ago nothing has changed: what did since may not have arrived yet."""
        last = reports.loads[-1]
        passed_s = now - self._interval_s - reports.seen_at
        reports.add(replace(last, clock_s=last.clock_s + passed_s), now - self._interval_s)


def _take(reports: _Reports, load: WorkerLoad, now: float) -> None:
    reports.told = load
    while len(reports.loads) > 1 and reports.loads[-1].clock_s >= load.clock_s:
        reports.loads.pop()  # silence that was taken for longer than it was
    reports.add(load, now)


def _rates_between(first: WorkerLoad, last: WorkerLoad) -> WorkerRates:
    seconds = last.clock_s - first.clock_s
    if seconds <= 0.0:
        return IDLE
    before = dict(first.received)
    received = {
        peer: max(0, num_bytes - before.get(peer, 0)) / seconds for peer, num_bytes in last.received
    }
    return WorkerRates(
        tokens=max(0, last.num_tokens_done - first.num_tokens_done) / seconds,
        steps=max(0, last.num_steps_done - first.num_steps_done) / seconds,
        received={peer: rate for peer, rate in received.items() if rate},
        drafts=_drafts_between(first.drafts or DraftTotals(), last.drafts, seconds),
    )


def _drafts_between(first: DraftTotals, last: DraftTotals | None, seconds: float) -> DraftRates:
    if last is None or last.num_verifications <= first.num_verifications:
        return DraftRates()
    verified = _grown(first.verified, last.verified)
    accepted = _grown(first.accepted, last.accepted)
    num_verifications = last.num_verifications - first.num_verifications
    return DraftRates(
        drafts=sum(verified) / seconds,
        accept_length=1 + sum(accepted) / num_verifications,
        acceptance=tuple(right / num for right, num in zip(accepted, verified, strict=True) if num),
    )


def _grown(first: tuple[int, ...], last: tuple[int, ...]) -> list[int]:
    """By how much each count has grown; the first report may have none."""
    return [count - before for before, count in zip(first or (0,) * len(last), last, strict=True)]
