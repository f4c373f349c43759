"""The load of one member, merged from what it reports and what this process has there.

A report is always a little old, and our own count is exact. So the load is our requests in flight
plus what others had there when the member last reported. Reports come by two ways, renewals and
frames; their sequence numbers say which is the newer, and each counts once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from router.pool.members import WorkerLoad
from router.pool.rates import MeasuredRates
from runtime.tiers import tokens_ahead


class _Ours(NamedTuple):
    num_requests: int = 0
    num_tokens: int = 0

    def or_more(self, other: _Ours) -> _Ours:
        return _Ours(
            max(self.num_requests, other.num_requests), max(self.num_tokens, other.num_tokens)
        )


@dataclass(slots=True)
class MergedLoad:
    """Of one life of one member."""

    report: WorkerLoad = field(default_factory=WorkerLoad)
    """The newest."""
    rates: MeasuredRates = field(default_factory=MeasuredRates)
    """From all reports."""
    num_ours: int = 0
    """Requests of this process in flight there."""
    _our_tokens: int = 0
    _sequence: int = 0
    # The most since the last report and since the one before. A report is made a moment before it
    # arrives, perhaps while another is on its way: what has ended meanwhile was still in it, and
    # must not pass for somebody else's until the next one.
    _most: _Ours = field(default_factory=_Ours)
    _most_before: _Ours = field(default_factory=_Ours)
    _others: int = 0
    _others_tokens: int = 0
    # Sent since the last report, and between that one and the one before.
    _entered: int = 0
    _entered_before: int = 0

    @property
    def num_requests(self) -> int:
        """Running and waiting, of all routers."""
        return self.num_ours + self._others

    @property
    def num_tokens(self) -> int:
        """Prompt tokens not computed yet, of all routers."""
        return self._our_tokens + self._others_tokens

    @property
    def num_tokens_left(self) -> int:
        """The same as of now: what a worker has computed of our prompts is in its report already.

        A report may have been made before the latest prompts came there, so these count anyway.
        """
        if not self._sequence:
            return self.num_tokens
        sent = self._entered + self._entered_before
        return min(self.num_tokens, self.report.num_tokens_waiting + sent)

    def num_tokens_ahead(self, order: int) -> float:
        """Of ``num_tokens_left``, what is computed before a prompt of this tier that comes now.

        What the report does not say by tier counts as ahead: the latest prompts, and everything
        where there is one tier.
        """
        left, by_tier = self.num_tokens_left, self.report.tokens_by_tier
        if not by_tier:
            return left
        behind = self.report.num_tokens_waiting - tokens_ahead(by_tier, order)
        return max(0.0, left - behind)

    def apply(self, report: WorkerLoad) -> bool:
        """Take a report; False where it is not newer than the one that is held."""
        self.rates.observe(report)  # by its clock: it may say more than a newer one
        if report.sequence == 0:
            if report == self.report:
                return False
        elif report.sequence <= self._sequence:
            return False
        else:
            self._sequence = report.sequence
        self.report = report
        most = self._most.or_more(self._most_before)
        self._others = max(0, report.num_requests - most.num_requests)
        self._others_tokens = max(0, report.num_tokens_waiting - most.num_tokens)
        self._most_before = self._most
        self._entered_before, self._entered = self._entered, 0
        self._most = _Ours(self.num_ours, self._our_tokens)
        return True

    def enter(self, num_tokens: int) -> None:
        """One more request of ours, with so many prompt tokens."""
        self.num_ours += 1
        self._our_tokens += num_tokens
        self._entered += num_tokens
        most = self._most
        if self.num_ours > most.num_requests or self._our_tokens > most.num_tokens:
            self._most = most.or_more(_Ours(self.num_ours, self._our_tokens))

    def leave(self, num_tokens: int) -> None:
        """One of them has ended."""
        self.num_ours -= 1
        self._our_tokens -= num_tokens
