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

from runtime.stragglers.rank_waits import (
    BLOCKS_OF_WINDOW,
    STEPS_OF_BLOCK,
    Floats,
    Phase,
    WaitWindow,
)
from runtime.stragglers.robust import middle_mean


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
        carry_s: more on that link between the first and the last of what is sent.
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
    carry_s: float = 0.0
    context: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Of ranks without a fault, seconds; shares are standard deviations.

    The times are those of a layer of DeepSeek-V3 with 128 tokens a rank on an H200, about.

    Attributes:
        carry_s: of `link_s`, between the first and the last of what is sent.
        differ: by which shares attention of ranks differs for ever, dealt to them in turn.
        wander: of attention of a rank from block to block, as GPUs at their power limit have it.
    """

    num_layers: int = 8
    gap_s: float = 100e-6
    attention_s: float = 60e-6
    experts_s: float = 50e-6
    link_s: float = 8e-6
    carry_s: float = 3e-6
    jitter: float = 0.02
    rank_spread: float = 0.004
    rows_spread: float = 0.015
    pause_chance: float = 0.004
    pause_s: float = 2e-3
    differ: tuple[float, ...] = (0.0,)
    wander: float = 0.0


class PlayedRanks:
    """N groups of R ranks, each of which runs a window of steps."""

    def __init__(
        self, num_windows: int, num_ranks: int, fault: Fault, *, seed: int, timing: Timing
    ) -> None:
        self._size = (num_windows, num_ranks)
        self._timing = timing
        self._random = np.random.default_rng(seed)
        # What differs for as long as the machines run.
        spread = self._random.normal(1.0, timing.rank_spread, (2, *self._size))
        differ = 1.0 + np.resize(timing.differ, num_ranks)
        self._usual_attention = timing.attention_s * spread[0] * differ
        self._experts = timing.experts_s * spread[1]
        self._usual_rows = self._random.normal(1.0, timing.rows_spread, self._size)
        self._wander = np.ones(self._size)
        self._now = np.zeros(self._size)
        self._num_blocks = 0
        self.break_down(fault)

    def break_down(self, fault: Fault) -> None:
        """Have this be wrong from now on, and nothing else."""
        timing, num_ranks = self._timing, self._size[1]
        self._fault, self._befalls = fault, np.isin(np.arange(num_ranks), fault.ranks)
        longer = np.where(self._befalls, fault.attention * fault.context, 1.0)
        self._attention = self._usual_attention * longer
        self._rows = self._usual_rows * np.where(self._befalls, fault.rows, 1.0)
        self._firsts = np.full((num_ranks, num_ranks), timing.link_s - timing.carry_s)
        self._carries = np.full((num_ranks, num_ranks), timing.carry_s)
        for links in (self._firsts, self._carries):
            np.fill_diagonal(links, 0.0)
        if fault.source >= 0:
            self._firsts[list(fault.ranks), fault.source] += fault.link_s
            self._carries[list(fault.ranks), fault.source] += fault.carry_s

    def windows(self, num_blocks: int = BLOCKS_OF_WINDOW) -> list[WaitWindow]:
        """Run steps, behind those that ran, and return what the ranks of each group record."""
        first = self._num_blocks
        blocks = [self._block(first + number) for number in range(num_blocks)]
        self._num_blocks += num_blocks
        waits, firsts, own, mean = (np.stack([b[i] for b in blocks], axis=1) for i in range(4))
        rows = np.repeat(1000.0 * self._rows[:, None], num_blocks, axis=1)
        tokens = np.full_like(rows, 128.0)
        context = np.where(self._befalls, self._fault.context, 1.0) * tokens * 4096.0
        return [
            WaitWindow(
                first_block=first,
                waits_s=waits[n],
                first_waits_s=firsts[n],
                own_s=own[n],
                own_mean_s=mean[n],
                num_rows=rows[n],
                num_tokens=tokens[n],
                num_context_tokens=context[n],
            )
            for n in range(self._size[0])
        ]

    def _block(self, number: int) -> tuple[Floats, ...]:
        """Return waits until the last and the first [N, P, R, R], and own work [N, P, R] of the
        middle steps and of the mean one.
        """
        drawn = self._random.normal(0.0, 1.0, self._size) if self._timing.wander else 0.0
        self._wander = np.asarray(1.0 + self._timing.wander * drawn)
        steps = [self._step(number * STEPS_OF_BLOCK + step) for step in range(STEPS_OF_BLOCK)]
        waits, firsts, own = (np.stack([step[i] for step in steps]) for i in range(3))
        middles = (middle_mean(figures, 0) for figures in (waits, firsts, own))
        return (*middles, own.mean(axis=0))

    def _step(self, step: int) -> tuple[Floats, Floats, Floats]:
        timing, fault, num_ranks = self._timing, self._fault, self._size[1]
        waits = np.zeros((2, self._size[0], len(Phase), num_ranks, num_ranks))
        own = np.zeros((self._size[0], len(Phase), num_ranks))
        before = self._varied(timing.gap_s) + np.where(self._befalls, fault.gap_s, 0.0)
        before = before + timing.pause_s * (self._random.random(self._size) < timing.pause_chance)
        if fault.pause_every and step % fault.pause_every == 0:
            before = before + np.where(self._befalls, fault.pause_s, 0.0)
        attention = self._attention * self._wander
        for layer in range(timing.num_layers):
            phase = Phase.DISPATCH if layer else Phase.FIRST
            work = self._varied(attention) + (0.0 if layer else before)
            self._meet(phase, work, waits, own)
            self._meet(Phase.COMBINE, self._varied(self._experts * self._rows), waits, own)
        return waits[0], waits[1], own

    def _meet(self, phase: Phase, work: Floats, waits: Floats, own: Floats) -> None:
        own[:, phase] += work
        ready = self._now + work
        varied = self._random.normal(1.0, 0.05, (*self._size, self._size[1]))
        is_other = ~np.eye(self._size[1], dtype=bool)
        for place, links in enumerate((self._firsts + self._carries, self._firsts)):
            arrived = ready[:, None, :] + links * varied  # [N, receiver, source]
            late = np.maximum(0.0, arrived - ready[:, :, None]) * is_other
            waits[place, :, phase] += late
            if not place:
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
