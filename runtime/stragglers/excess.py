"""Outlier tests: a figure against the other ranks, and against its own variation. Pure.

The reference is the lower median over the ranks, which half of them may leave without moving it.
How far from it is too far: a few percent of the work; several times what the figure varies by from
block to block, pooled over the ranks, so that a noisy host makes its own threshold; and further
than the fast half lies apart. It must be so in most blocks of the window.

What a figure varies by is known badly from one window of a few ranks: twelve degrees of freedom of
four. So whoever looks again and again remembers the noise of the windows before (`WindowNoise`),
and the threshold follows from how seldom there may be an alarm for nothing: `ALARMS_AN_HOUR`, over
all looks of an hour and all figures of a look, by Student's distribution (`deviations`). Also what
wanders more slowly than a window is long is noise: it is seen between windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final

import numpy as np

from runtime.stragglers.rank_waits import BLOCKS_OF_WINDOW, Floats
from runtime.stragglers.robust import (
    block_noise,
    deviation_of_middle,
    lower_median_of,
    mad_of,
    middle_mean,
    student_quantile,
)

ALARMS_AN_HOUR: Final = 0.05
"""For nothing, of one instance: bounded by this where noise is normal, or less heavy."""
LOOKS_AN_HOUR: Final = 3600
"""An instance is looked at every 2 s, at windows of two lengths."""
FIGURES_OF_RANK: Final = 5
"""Own work of three phases, gaps and pauses."""
FIGURES_OF_LINK: Final = 4
"""How long one waits, and how long what is sent comes, of two phases."""
EARLIER_WINDOWS: Final = 3
"""From so many on the noise of earlier windows is trusted."""
_WANDERS: Final = 1.3
"""Times what blocks explain, from which on windows are said to wander; some is chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is too much.

    Attributes:
        ratio: of the work of a phase (of a step, for hosts), above the reference.
        differ: that ranks of one kind may differ for ever, beside the noise, likewise.
        deviations: of what the figure varies by, at most: without earlier windows.
        own_deviations: of what it varies by in this window alone, with earlier ones.
        spreads: of the distance between the reference and the fastest rank.
        blocks: share of the blocks in which it must be so; of all of them for pauses, which befall
            everybody now and then.
        heard: share of a rank's excess that the others must have waited for.
        explained: share of an excess that more work must have to explain it.
        rows: above the reference, for a hot receiver.
    """

    ratio: float = 0.03
    differ: float = 0.01
    deviations: float = 6.0
    own_deviations: float = 3.5
    spreads: float = 2.0
    blocks: float = 0.6
    heard: float = 0.25
    explained: float = 0.5
    rows: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """Of something over the reference: of every rank or cell.

    Attributes:
        typical: [...] the middle of the blocks.
        noise: of that, for all of them alike.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowNoise:
    """What is remembered of a window that was looked at: by the figure's name.

    Attributes:
        of_block: what the figure varies by from block to block.
        beside: [R] the figure of each rank less that of the median rank.
    """

    of_block: Mapping[str, float]
    beside: Mapping[str, Floats]


def deviations(num_figures: int, degrees: float) -> float:
    """Return how many deviations are so rare that there are `ALARMS_AN_HOUR`.

    Args:
        num_figures: that a look judges, half of the alarms are theirs: ranks', or links'.
        degrees: of freedom of the noise.
    """
    rare = 0.5 * ALARMS_AN_HOUR / (LOOKS_AN_HOUR * max(1, num_figures))
    return student_quantile(NormalDist().inv_cdf(1.0 - rare), degrees)


class Judge:
    """Judges the figures of one window, by their names.

    Attributes:
        noise: of all that was judged so far.
    """

    def __init__(self, num_ranks: int, limits: Limits, earlier: Sequence[WindowNoise]) -> None:
        """Know the noise of earlier windows, of other blocks than are judged."""
        self._num_ranks, self._limits, self._earlier = num_ranks, limits, earlier
        self._of_block: dict[str, float] = {}
        self._beside: dict[str, Floats] = {}
        self.noise = WindowNoise(of_block=self._of_block, beside=self._beside)

    def ranks(
        self, name: str, figures: Floats, base: float | None = None, *, often: float | None = None
    ) -> Excess:
        """Judge [B, R] against the lower median of the ranks.

        Args:
            name: of the figure.
            figures: of every block and rank.
            base: what ratios are of; None for the reference.
            often: share of the blocks in which it must be so; None for the limit.
        """
        reference = lower_median_of(figures, 1)
        spread = np.median(reference - figures.min(axis=1))
        usual = float(np.median(reference)) if base is None else base
        # Against the reference the one of two ranks that is ahead would seem not to vary at all.
        beside = figures - np.median(figures, axis=1)[:, None]
        beside = beside * self._num_ranks / (self._num_ranks - 1)
        self._of_block[name] = block_noise(beside)
        self._beside[name] = middle_mean(beside, 0)
        more = figures - reference[:, None]
        noise, certain = self._certain(name, len(figures), self._num_ranks * FIGURES_OF_RANK, usual)
        return self.judged(more, usual, noise=noise, certain=certain, spread=spread, often=often)

    def links(self, name: str, left: Floats, base: float) -> Excess:
        """Judge [B, R, R] of every pair; NaN on the diagonal."""
        typical = middle_mean(left, 0)
        apart = np.maximum(mad_of(typical, 1)[:, None], mad_of(typical, 0)[None, :])
        left = np.nan_to_num(left)
        self._of_block[name] = block_noise(left)
        num_figures = FIGURES_OF_LINK * self._num_ranks * (self._num_ranks - 1)
        noise, certain = self._certain(name, len(left), num_figures, base)
        spread = 2.0 * np.nan_to_num(apart)
        return self.judged(left, base, noise=noise, certain=certain, spread=spread)

    def judged(
        self,
        more: Floats,
        base: float,
        *,
        noise: float,
        certain: float,
        spread: Floats,
        often: float | None = None,
    ) -> Excess:
        """Say where [B, ...] is more than is certain, and than ranks lie apart."""
        limits = self._limits
        typical = middle_mean(more, 0)
        least = np.maximum(certain, limits.spreads * spread)
        enough = limits.blocks if often is None else often
        is_often = (more >= 0.5 * least).mean(axis=0) >= enough
        return Excess(
            typical=typical, noise=noise, base=base, is_found=(typical > least) & is_often
        )

    def _certain(
        self, name: str, num_blocks: int, num_figures: int, base: float
    ) -> tuple[float, float]:
        """Return the noise of a figure's middle, and what is too much by it and by the ratio."""
        limits, own = self._limits, self._of_block[name]
        to_middle = deviation_of_middle(num_blocks)
        before = [each.of_block[name] for each in self._earlier if name in each.of_block]
        if len(before) < EARLIER_WINDOWS:
            noise = own * to_middle
            return noise, max(limits.ratio * base, limits.deviations * noise + limits.differ * base)
        squares = float(np.mean(np.square([*before, own])))
        noise = (squares * to_middle**2 + self._wander(name, squares)) ** 0.5
        degrees = (len(before) + 1) * (BLOCKS_OF_WINDOW - 1) * (self._num_ranks - 1)
        factor = min(limits.deviations, deviations(num_figures, degrees))
        by_noise = factor * noise + limits.differ * base
        return noise, max(limits.ratio * base, by_noise, limits.own_deviations * own * to_middle)

    def _wander(self, name: str, squares: float) -> float:
        """Return the square of what windows vary by beyond what their blocks explain."""
        rows = [each.beside[name] for each in self._earlier if name in each.beside]
        if name not in self._beside or len(rows) < EARLIER_WINDOWS:
            return 0.0
        # Of ranks one by one, and of these the median: some may have become slow meanwhile.
        between = float(np.median(mad_of(np.array([*rows, self._beside[name]]), 0))) ** 2
        explained = squares * deviation_of_middle(BLOCKS_OF_WINDOW) ** 2
        return between - explained if between > _WANDERS**2 * explained else 0.0
