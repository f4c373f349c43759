"""Which rank or link slows the others down, and why: robust statistics over waits. Pure.

A slow rank is found twice. *Cause*: what it did by itself before it waited took longer than on the
others. *Consequence*: the others waited for it, and it for nobody. Only both together are a
finding, so that work which nobody waits for is none, and neither is a wait that somebody else
caused: whoever waits for a slow link comes late to the next meeting.

What is too much is judged beside the other ranks and by what the figure varies by
(`runtime.stragglers.excess`): two slow of four are found.

Where two ranks are all that there are, of two that differ the slower is found; links need four.

Lateness is what waits say of ranks alone: from the wait of i for j and that of j for i follows how
much later j came, whatever the delay of the link. A median polish makes one number a rank of it,
which one slow link cannot move. What is left of the waits without it is the links'. Where the first
and the last of what a source sends are told apart, lateness is of the first: a rank that computes
longer sends all of it late, and a slow link brings the first in time and the last too late.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from runtime.stragglers.excess import Excess, Judge, Limits, WindowNoise
from runtime.stragglers.rank_waits import Floats, Phase, WaitWindow
from runtime.stragglers.robust import lower_median, lower_median_of, middle_mean

_POLISHES = 24

RANKS_FOR_LINKS: Final = 4
"""Of fewer a link has too few others beside it to be told from its ranks."""


class SlowKind(enum.Enum):
    """Why others wait; the value is its name in metrics."""

    SENDER = "slow_sender"
    """Its GPU or CPU takes longer for as much work."""
    RECEIVER = "hot_receiver"
    """Its experts get more rows."""
    LINK = "slow_link"
    """What one rank sends to one other takes longer."""
    HOST = "slow_host"
    """Its steps begin late, or it stands still now and then."""
    LOAD = "uneven_load"
    """It has more tokens or longer contexts: nothing is broken."""

    @property
    def is_fault(self) -> bool:
        """Whether somebody should look at the machine or the placement."""
        return self is not SlowKind.LOAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rank, or one link.

    Attributes:
        kind: see there.
        rank: that is slow; of a link, the one that waits.
        source: of a link, the rank that is waited for; else -1.
        ratio: of the work, or of the wait's phase, to what is usual: 1.05 is 5 % too long.
        share: of a step that is lost by it.
        confidence: how many times what the figure varies by.
        evidence: figures by name, with units in the names.
    """

    kind: SlowKind
    rank: int
    source: int = -1
    ratio: float
    share: float
    confidence: float
    evidence: Mapping[str, float]


def describe_finding(finding: Finding) -> dict[str, object]:
    """What was found, without words."""
    return {
        "kind": finding.kind.value,
        "rank": finding.rank,
        "source": finding.source,
        "ratio": round(finding.ratio, 4),
        "share": round(finding.share, 5),
        "confidence": round(finding.confidence, 1),
        "evidence": dict(finding.evidence),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """At one window.

    Attributes:
        findings: the worst first; most often none.
        noise: to be remembered for the windows behind.
    """

    findings: Sequence[Finding]
    noise: WindowNoise


def find_slow(window: WaitWindow, limits: Limits | None = None) -> list[Finding]:
    """Return what slows the ranks of a window down, the worst first; nothing is known of earlier.

    Raises:
        ValueError: there are fewer than two ranks, or no blocks.
    """
    return list(look_at(window, limits=limits).findings)


def look_at(
    window: WaitWindow, earlier: Sequence[WindowNoise] = (), limits: Limits | None = None
) -> Look:
    """Look for what slows the ranks of a window down.

    Args:
        window: of all ranks.
        earlier: noise of windows of other blocks, of the same ranks.
        limits: how much is too much.

    Raises:
        ValueError: there are fewer than two ranks, or no blocks.
    """
    if window.num_ranks < 2 or not len(window.own_s):
        shape = window.own_s.shape
        raise ValueError(f"window [blocks, phases, ranks] = {shape}. Fix: 2 ranks and 1 block")
    search = _Search(window, limits or Limits(), earlier)
    found = search.ranks()
    found += search.links({finding.rank for finding in found})
    found.sort(key=lambda finding: -finding.share)
    return Look(findings=found, noise=search.noise)


class _Search:
    """All that is looked for in one window."""

    def __init__(self, window: WaitWindow, limits: Limits, earlier: Sequence[WindowNoise]) -> None:
        self._window, self._limits = window, limits
        self._step_s = window.step_s or 1.0
        judge = self._judge = Judge(window.num_ranks, limits, earlier)
        self.noise = judge.noise
        self._lateness = _polished(window.first_waits_s)
        self._own = [judge.ranks(f"own_{p.name}", window.own_s[:, p]) for p in Phase]
        self._late = [
            judge.ranks(f"late_{p.name}", self._lateness[:, p], self._own[p].base) for p in Phase
        ]
        pauses = (window.own_mean_s - window.own_s).sum(axis=1)
        self._pauses = judge.ranks("pauses", pauses, self._step_s, often=1.0)
        self._gap = judge.ranks("gap", window.own_s[:, Phase.FIRST], self._step_s)
        self._rows = _more_than_usual(window.num_rows)
        self._load = np.maximum(
            _more_than_usual(window.num_tokens), _more_than_usual(window.num_context_tokens)
        )

    def ranks(self) -> list[Finding]:
        """Return what is slow of a rank itself; several causes of one rank are all there."""
        found: list[Finding] = []
        for rank in range(self._window.num_ranks):
            computing = self._computing(rank)
            found += computing
            found += self._hosting(rank, max((f.ratio for f in computing), default=1.0))
        return found

    def links(self, slow: Collection[int]) -> list[Finding]:
        """Return the links that take longer than the others.

        Args:
            slow: ranks of which something is found: what they send and receive may be slow by that.
        """
        if self._window.num_ranks < RANKS_FOR_LINKS:
            return []
        found: dict[tuple[int, int], Finding] = {}
        for phase in (Phase.DISPATCH, Phase.COMBINE):
            for excess, is_theirs in ((self._of_links(phase), False), (self._carried(phase), True)):
                for receiver, source in np.argwhere(excess.is_found).tolist():
                    if is_theirs and {receiver, source}.intersection(slow):
                        continue
                    finding = self._link(excess, receiver, source)
                    known = found.get((receiver, source))
                    if known is None or known.share < finding.share:
                        found[receiver, source] = finding
        return list(found.values())

    def _computing(self, rank: int) -> list[Finding]:
        found = []
        sending, combining = self._own[Phase.DISPATCH], self._own[Phase.COMBINE]
        is_sender = sending.is_found[rank] and self._is_heard(Phase.DISPATCH, rank)
        late = self._late[Phase.COMBINE]
        is_slow = combining.is_found[rank] and self._is_heard(Phase.COMBINE, rank)
        rows = float(self._rows[rank])
        is_explained = self._explains(rows, combining.ratio(rank))
        if rows >= self._limits.rows and is_explained and (is_slow or late.is_found[rank]):
            worse = combining if is_slow else late
            found.append(self._finding(SlowKind.RECEIVER, rank, worse, rows_ratio=1.0 + rows))
            # Its experts wear on what the GPU does beside and behind them: power, the side stream.
            is_sender &= float(sending.typical[rank]) > float(worse.typical[rank])
        elif is_slow and not is_explained and not is_sender:
            found.append(self._finding(self._sender_kind(rank, combining), rank, combining))
        if is_sender:
            also = combining.ratio(rank) if is_slow else 1.0
            kind = self._sender_kind(rank, sending)
            found.append(self._finding(kind, rank, sending, experts_ratio=also))
        return found

    def _hosting(self, rank: int, computing: float) -> list[Finding]:
        """Return that steps begin late, unless the rank computes as much slower in there, too."""
        gap, pauses = self._gap, self._pauses
        first = self._own[Phase.FIRST]
        is_gap = gap.is_found[rank] and first.is_found[rank] and self._is_heard(Phase.FIRST, rank)
        if is_gap and first.ratio(rank) - 1.0 > 2.0 * (computing - 1.0):
            kind = SlowKind.HOST
            if self._explains(float(self._load[rank]), first.ratio(rank)):
                kind = SlowKind.LOAD
            return [self._finding(kind, rank, gap, first_ratio=first.ratio(rank))]
        if pauses.is_found[rank]:
            return [self._finding(SlowKind.HOST, rank, pauses, pauses=1.0)]
        return []

    def _sender_kind(self, rank: int, excess: Excess) -> SlowKind:
        is_explained = self._explains(float(self._load[rank]), excess.ratio(rank))
        return SlowKind.LOAD if is_explained else SlowKind.SENDER

    def _explains(self, more: float, ratio: float) -> bool:
        """Whether so much more work is most of an excess, or leaves too little of it."""
        limits = self._limits
        return more >= limits.explained * (ratio - 1.0) or ratio - 1.0 - more < limits.ratio

    def _is_heard(self, phase: Phase, rank: int) -> bool:
        """Whether others waited for what the rank did longer."""
        heard = float(self._late[phase].typical[rank])
        return heard >= self._limits.heard * float(self._own[phase].typical[rank])

    def _finding(self, kind: SlowKind, rank: int, excess: Excess, **evidence: float) -> Finding:
        own = middle_mean(self._window.own_s, 0)
        late = [float(of.typical[rank]) for of in self._late]
        figures = {
            **{f"own_{p.name.lower()}_s": float(own[p, rank]) for p in Phase},
            **{f"usual_{p.name.lower()}_s": self._own[p].base for p in Phase},
            **{f"late_{p.name.lower()}_s": late[p] for p in Phase},
            "excess_s": float(excess.typical[rank]),
            "rows_more": float(self._rows[rank]),
            "load_more": float(self._load[rank]),
            **evidence,
        }
        return Finding(
            kind=kind,
            rank=rank,
            ratio=excess.ratio(rank),
            share=float(excess.typical[rank]) / self._step_s,
            confidence=excess.confidence(rank),
            evidence=figures,
        )

    def _of_links(self, phase: Phase) -> Excess:
        """Return [R, R] what waits take longer than ranks' lateness and the usual link explain."""
        waits, late = self._window.waits_s[:, phase], self._lateness[:, phase]
        later = late[:, None, :] - late[:, :, None]  # [B, receiver, source]
        left = waits - np.maximum(0.0, later + _usual_link(waits)[:, None, None])
        left = np.where(np.eye(self._window.num_ranks, dtype=bool), np.nan, left)
        # What all links of a receiver or of a source share is no link's.
        left = left - np.maximum(0.0, lower_median_of(left, 2))[:, :, None]
        left = left - np.maximum(0.0, lower_median_of(left, 1))[:, None, :]
        return self._judge.links(f"link_{phase.name}", left, self._own[phase].base or self._step_s)

    def _carried(self, phase: Phase) -> Excess:
        """Return [R, R] what comes longer behind the first of it than from any other source, and
        more rows do not explain.

        All links of a source may be slow alike, of which waits for it say nothing. Whoever comes
        late sees nothing of what came before, so of most sources less is seen than of the last:
        only the longest that is seen of another source is usual.
        """
        window, num_ranks = self._window, self._window.num_ranks
        carried = window.waits_s[:, phase] - window.first_waits_s[:, phase]
        longest = carried.max(axis=1)  # [B, source]; nobody waits for itself
        others = np.where(np.eye(num_ranks, dtype=bool), 0.0, longest[:, None, :]).max(axis=2)
        more = 1.0 + np.maximum(0.0, self._rows)[:, None] + np.maximum(0.0, self._load)[None, :]
        left = np.where(np.eye(num_ranks, dtype=bool), np.nan, carried - others[:, None, :] * more)
        return self._judge.links(
            f"carried_{phase.name}", left, self._own[phase].base or self._step_s
        )

    def _link(self, excess: Excess, receiver: int, source: int) -> Finding:
        window = self._window
        waited, first = (middle_mean(of, 0) for of in (window.waits_s, window.first_waits_s))
        return Finding(
            kind=SlowKind.LINK,
            rank=receiver,
            source=source,
            ratio=excess.ratio(receiver, source),
            share=float(excess.typical[receiver, source]) / self._step_s,
            confidence=excess.confidence(receiver, source),
            evidence={
                "excess_s": float(excess.typical[receiver, source]),
                **{f"wait_{p.name.lower()}_s": float(waited[p, receiver, source]) for p in Phase},
                **{f"first_{p.name.lower()}_s": float(first[p, receiver, source]) for p in Phase},
                **{f"back_{p.name.lower()}_s": float(waited[p, source, receiver]) for p in Phase},
            },
        )


def _usual_link(waits: Floats) -> Floats:
    """Return [...], the delay of a usual link, from waits [..., R, R].

    Whoever is later, two ranks' waits for each other are twice the delay between them, unless one
    is later by more than that and waits for nothing: then they are more.
    """
    pairs = np.triu_indices(waits.shape[-1], 1)
    mean = 0.5 * (waits + waits.swapaxes(-1, -2))
    return lower_median_of(mean[..., pairs[0], pairs[1]], -1)


def _polished(waits: Floats) -> Floats:
    """Return [B, P, R], how much later a rank came than the others, from waits [B, P, R, R].

    The median polish of how much later a source came than a receiver, in half steps: whole ones
    swing for ever where half of the ranks are slow.
    """
    apart = waits - waits.swapaxes(2, 3)
    # The one of two that comes first waits longer by its lead, and the other shorter by it, down
    # to nothing.
    lead = np.maximum(0.5 * np.abs(apart), np.abs(apart) - _usual_link(waits)[..., None, None])
    later = np.sign(apart) * lead
    late = np.zeros(waits.shape[:3])
    for _ in range(_POLISHES):
        seen = np.median(later + late[..., :, None], axis=2)
        late = 0.5 * (late + seen)
        late -= np.median(late, axis=2, keepdims=True)
    return late


def _more_than_usual(figures: Floats) -> Floats:
    """Return [R]: by which share the mean of [B, R] is above the lower median of the ranks."""
    mean = figures.mean(axis=0)
    usual = lower_median(mean)
    if usual <= 0.0:
        return np.where(mean > 0.0, np.inf, 0.0)
    return np.asarray(mean / usual - 1.0)


def worst(findings: Sequence[Finding]) -> Finding | None:
    """Return the first that is a fault, if any is."""
    return next((finding for finding in findings if finding.kind.is_fault), None)
