"""Ranks that keep step, played: a model of time for what no machine here has ranks for.

Each layer: attention; rows go out, and a rank waits for those of all others; experts; rows go home,
and it waits again. Between two steps there is the host's work. A rank comes to a meeting when its
own work is done, and leaves it when what all others have sent has arrived; what it waits for whom,
on its own clock, is what the exchanges record. Everything varies: work from layer to layer, ranks
by a little for ever, hosts by pauses now and then.

Letters: N windows at once, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.rank_waits import BLOCKS_OF_WINDOW, STEPS_OF_BLOCK, Floats, Phase, WaitWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong; factors are 1 and times 0 where nothing is.

    Attributes:
        ranks: that it befalls.
        attention: factor of their attention.
        rows: factor of the rows of their experts.
        gap_s: more between two of their steps.
        pause_s: they stand still for so long ...
        pause_every: ... once in so many steps; 0 for never.
        source: of a slow link; `ranks` are the receivers, -1 for none.
        link_s: more on that link.
        context: factor of their contexts, which their attention takes longer for.
    """

    ranks: tuple[int, ...] = ()
    attention: float = 1.0
    rows: float = 1.0
    gap_s: float = 0.0
    pause_s: float = 0.0
    pause_every: int = 0
    source: int = -1
    link_s: float = 0.0
    context: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Of ranks without a fault, seconds; shares are standard deviations.

    The times are those of a layer of DeepSeek-V3 with 128 tokens a rank on an H200, about.
    """

    num_layers: int = 8
    gap_s: float = 100e-6
    attention_s: float = 60e-6
    experts_s: float = 50e-6
    link_s: float = 8e-6
    jitter: float = 0.02
    rank_spread: float = 0.004
    rows_spread: float = 0.015
    pause_chance: float = 0.004
    pause_s: float = 2e-3


class PlayedRanks:
    """N groups of R ranks, each of which runs a window of steps."""

    def __init__(
        self, num_windows: int, num_ranks: int, fault: Fault, *, seed: int, timing: Timing
    ) -> None:
        self._size = (num_windows, num_ranks)
        self._fault, self._timing = fault, timing
        self._random = np.random.default_rng(seed)
        self._befalls = np.isin(np.arange(num_ranks), fault.ranks)
        self._links = np.full((num_ranks, num_ranks), timing.link_s)
        np.fill_diagonal(self._links, 0.0)
        if fault.source >= 0:
            self._links[list(fault.ranks), fault.source] += fault.link_s
        # What differs for as long as the machines run.
        spread = self._random.normal(1.0, timing.rank_spread, (2, *self._size))
        self._attention = timing.attention_s * spread[0]
        self._experts = timing.experts_s * spread[1]
        self._attention *= np.where(self._befalls, fault.attention * fault.context, 1.0)
        drawn = self._random.normal(1.0, timing.rows_spread, self._size)
        self._rows = drawn * np.where(self._befalls, fault.rows, 1.0)
        self._now = np.zeros(self._size)

    def windows(self) -> list[WaitWindow]:
        """Run all steps, and return what the ranks of each group record."""
        blocks = [self._block(number) for number in range(BLOCKS_OF_WINDOW)]
        waits, own, mean = (np.stack([b[i] for b in blocks], axis=1) for i in range(3))
        rows = np.repeat(1000.0 * self._rows[:, None], BLOCKS_OF_WINDOW, axis=1)
        tokens = np.full_like(rows, 128.0)
        context = np.where(self._befalls, self._fault.context, 1.0) * tokens * 4096.0
        return [
            WaitWindow(
                waits_s=waits[n],
                own_s=own[n],
                own_mean_s=mean[n],
                num_rows=rows[n],
                num_tokens=tokens[n],
                num_context_tokens=context[n],
            )
            for n in range(self._size[0])
        ]

    def _block(self, number: int) -> tuple[Floats, Floats, Floats]:
        """Return waits [N, P, R, R] and own work [N, P, R] of the median step, and of the mean."""
        steps = [self._step(number * STEPS_OF_BLOCK + step) for step in range(STEPS_OF_BLOCK)]
        waits, own = (np.stack([step[i] for step in steps]) for i in range(2))
        return np.median(waits, axis=0), np.median(own, axis=0), own.mean(axis=0)

    def _step(self, step: int) -> tuple[Floats, Floats]:
        timing, fault, num_ranks = self._timing, self._fault, self._size[1]
        waits = np.zeros((self._size[0], len(Phase), num_ranks, num_ranks))
        own = np.zeros((self._size[0], len(Phase), num_ranks))
        before = self._varied(timing.gap_s) + np.where(self._befalls, fault.gap_s, 0.0)
        before = before + timing.pause_s * (self._random.random(self._size) < timing.pause_chance)
        if fault.pause_every and step % fault.pause_every == 0:
            before = before + np.where(self._befalls, fault.pause_s, 0.0)
        for layer in range(timing.num_layers):
            phase = Phase.DISPATCH if layer else Phase.FIRST
            work = self._varied(self._attention) + (0.0 if layer else before)
            self._meet(phase, work, waits, own)
            self._meet(Phase.COMBINE, self._varied(self._experts * self._rows), waits, own)
        return waits, own

    def _meet(self, phase: Phase, work: Floats, waits: Floats, own: Floats) -> None:
        own[:, phase] += work
        ready = self._now + work
        links = self._links * self._random.normal(1.0, 0.05, (*self._size, self._size[1]))
        arrived = ready[:, None, :] + links  # [N, receiver, source]
        late = np.maximum(0.0, arrived - ready[:, :, None])
        late *= ~np.eye(self._size[1], dtype=bool)
        waits[:, phase] += late
        self._now = ready + late.max(axis=2)

    def _varied(self, seconds: float | Floats) -> Floats:
        drawn = self._random.normal(1.0, self._timing.jitter, self._size)
        return np.asarray(seconds * np.maximum(0.1, drawn))


def play(
    num_windows: int,
    num_ranks: int,
    fault: Fault | None = None,
    *,
    seed: int = 0,
    timing: Timing | None = None,
) -> list[WaitWindow]:
    """Return what groups of ranks record in their first 100 steps, each group by itself.

    Args:
        num_windows: N.
        num_ranks: R.
        fault: from the first step on; None for none.
        seed: of all that varies.
        timing: of ranks without a fault.
    """
    ranks = PlayedRanks(
        num_windows, num_ranks, fault or Fault(), seed=seed, timing=timing or Timing()
    )
    return ranks.windows()
