"""Which rank or link slows the others down, and why: robust statistics over waits. Pure.

A slow rank is found twice. *Cause*: what it did by itself before it waited took longer than on the
others. *Consequence*: the others waited for it, and it for nobody. Only both together are a
finding, so that work which nobody waits for is none, and neither is a wait that somebody else
caused: whoever waits for a slow link comes late to the next meeting.

The reference is the lower median over the ranks, which half of them may leave without moving it:
two slow of four are found. How far a rank must be from it: a few percent of the work; several times
what the figure varies by from block to block (pooled over the ranks, so a noisy host makes its own
threshold); and further than the fast half lies apart. It must be so in most blocks of the window.

Where two ranks are all that there are, of two that differ the slower is found; links need four.

Lateness is what waits say of ranks alone: from the wait of i for j and that of j for i follows how
much later j came, whatever the delay of the link. A median polish makes one number a rank of it,
which one slow link cannot move. What is left of the waits without it is the links'.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from runtime.rank_waits import Floats, Phase, WaitWindow
from runtime.robust import lower_median, lower_median_of, mad_of, noise_of_median

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is too much.

    Attributes:
        ratio: of the work of a phase (of a step, for hosts), above the reference.
        deviations: of what the figure varies by.
        spreads: of the distance between the reference and the fastest rank.
        blocks: share of the blocks in which it must be so; of all of them for pauses, which befall
            everybody now and then.
        heard: share of a rank's excess that the others must have waited for.
        explained: share of an excess that more work must have to explain it.
        rows: above the reference, for a hot receiver.
    """

    ratio: float = 0.03
    deviations: float = 6.0
    spreads: float = 2.0
    blocks: float = 0.6
    heard: float = 0.25
    explained: float = 0.5
    rows: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Excess:
    """Of something over the reference: of every rank or cell.

    Attributes:
        typical: [...] the median over blocks.
        noise: of that median, for all of them alike.
        base: what the ratio is of.
        is_found: [...] whether it is too much.
    """

    typical: Floats
    noise: float
    base: float
    is_found: np.ndarray = field(repr=False)

    def ratio(self, *index: int) -> float:
        """To what is usual."""
        return 1.0 + float(self.typical[index]) / self.base if self.base else float("inf")

    def confidence(self, *index: int) -> float:
        """In deviations, at most 1000: a simulation has no noise."""
        return min(1000.0, float(self.typical[index]) / max(self.noise, 1e-12))


def find_slow(window: WaitWindow, limits: Limits | None = None) -> list[Finding]:
    """Return what slows the ranks of a window down, the worst first; most often nothing.

    Raises:
        ValueError: there are fewer than two ranks, or no blocks.
    """
    if window.num_ranks < 2 or not len(window.own_s):
        shape = window.own_s.shape
        raise ValueError(f"window [blocks, phases, ranks] = {shape}. Fix: 2 ranks and 1 block")
    search = _Search(window, limits or Limits())
    found = [*search.ranks(), *search.links()]
    return sorted(found, key=lambda finding: -finding.share)


class _Search:
    """All that is looked for in one window."""

    def __init__(self, window: WaitWindow, limits: Limits) -> None:
        self._window, self._limits = window, limits
        self._step_s = window.step_s or 1.0
        self._lateness = _polished(window.waits_s)
        self._own = [self._excess(window.own_s[:, p], None) for p in Phase]
        self._late = [self._excess(self._lateness[:, p], self._own[p].base) for p in Phase]
        pauses = (window.own_mean_s - window.own_s).sum(axis=1)
        self._pauses = self._excess(pauses, self._step_s, often=1.0)
        self._gap = self._excess(window.own_s[:, Phase.FIRST], self._step_s)
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

    def links(self) -> list[Finding]:
        """Return the links that take longer than the others."""
        if self._window.num_ranks < RANKS_FOR_LINKS:
            return []
        found: dict[tuple[int, int], Finding] = {}
        for phase in (Phase.DISPATCH, Phase.COMBINE):
            excess = self._of_links(phase)
            for receiver, source in np.argwhere(excess.is_found).tolist():
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

    def _sender_kind(self, rank: int, excess: _Excess) -> SlowKind:
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

    def _finding(self, kind: SlowKind, rank: int, excess: _Excess, **evidence: float) -> Finding:
        own = np.median(self._window.own_s, axis=0)
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

    def _of_links(self, phase: Phase) -> _Excess:
        """Return [R, R] what waits take longer than ranks' lateness and the usual link explain."""
        waits, late = self._window.waits_s[:, phase], self._lateness[:, phase]
        later = late[:, None, :] - late[:, :, None]  # [B, receiver, source]
        left = waits - np.maximum(0.0, later + _usual_link(waits)[:, None, None])
        left = np.where(np.eye(self._window.num_ranks, dtype=bool), np.nan, left)
        # What all links of a receiver or of a source share is no link's.
        left = left - np.maximum(0.0, lower_median_of(left, 2))[:, :, None]
        left = left - np.maximum(0.0, lower_median_of(left, 1))[:, None, :]
        typical = np.median(left, axis=0)
        apart = np.maximum(mad_of(typical, 1)[:, None], mad_of(typical, 0)[None, :])
        spread = 2.0 * np.nan_to_num(apart)
        left = np.nan_to_num(left)
        noise = noise_of_median(left)
        return self._judged(left, self._own[phase].base, noise=noise, spread=spread)

    def _link(self, excess: _Excess, receiver: int, source: int) -> Finding:
        waited = np.median(self._window.waits_s, axis=0)[:, receiver, source]
        back = np.median(self._window.waits_s, axis=0)[:, source, receiver]
        return Finding(
            kind=SlowKind.LINK,
            rank=receiver,
            source=source,
            ratio=excess.ratio(receiver, source),
            share=float(excess.typical[receiver, source]) / self._step_s,
            confidence=excess.confidence(receiver, source),
            evidence={
                "excess_s": float(excess.typical[receiver, source]),
                **{f"wait_{p.name.lower()}_s": float(waited[p]) for p in Phase},
                **{f"back_{p.name.lower()}_s": float(back[p]) for p in Phase},
            },
        )

    def _excess(
        self, figures: Floats, base: float | None, *, often: float | None = None
    ) -> _Excess:
        """Judge [B, R] against the lower median of the ranks.

        Args:
            figures: of every block and rank.
            base: what ratios are of; None for the reference.
            often: share of the blocks in which it must be so; None for the limit.
        """
        reference = lower_median_of(figures, 1)
        spread = np.median(reference - figures.min(axis=1))
        usual = float(np.median(reference)) if base is None else base
        # Against the reference the one of two ranks that is ahead would seem not to vary at all.
        num_ranks = figures.shape[1]
        beside = (figures - np.median(figures, axis=1)[:, None]) * num_ranks / (num_ranks - 1)
        noise = noise_of_median(beside)
        more = figures - reference[:, None]
        return self._judged(more, usual, noise=noise, spread=spread, often=often)

    def _judged(
        self,
        more: Floats,
        base: float,
        *,
        noise: float,
        spread: Floats,
        often: float | None = None,
    ) -> _Excess:
        limits = self._limits
        typical = np.median(more, axis=0)
        certain = max(limits.ratio * base, limits.deviations * noise)
        least = np.maximum(certain, limits.spreads * spread)
        enough = limits.blocks if often is None else often
        is_often = (more >= 0.5 * least).mean(axis=0) >= enough
        return _Excess(
            typical=typical, noise=noise, base=base, is_found=(typical > least) & is_often
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
