"""How long ranks wait for one another, in blocks of steps: what a rank tells, and what all say.

In every MoE layer a rank waits for the rows of all others twice, so that one slow rank slows them
all, and every one of them looks busy. Who was waited for says whose fault it is. All times are
differences on one rank's own clock: clocks of different ranks are never compared.

A *phase* is what a wait ends. Ranks run the same number of steps, so a block of the same number is
of the same steps on all of them. Letters: B blocks, P phases, R ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

STEPS_OF_BLOCK: Final = 20
BLOCKS_OF_WINDOW: Final = 5
"""A window is 100 steps: a second or two of decode."""


class Phase(enum.IntEnum):
    """What a rank did by itself before it waited; the value is the index in arrays."""

    FIRST = 0
    """All between two steps, and up to the first dispatch of a step: the host's work is there."""
    DISPATCH = 1
    """Attention and gate, before the dispatch of every further layer."""
    COMBINE = 2
    """The experts' GEMMs, before combine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBlock:
    """What one rank saw in `STEPS_OF_BLOCK` steps; seconds of a step, summed over its layers.

    Attributes:
        number: of the block, from 0: the step's number divided by `STEPS_OF_BLOCK`.
        waits_s: [P][R], of the middle steps, by phase and source; 0 for the rank itself.
        own_s: [P], of the middle steps: what the rank did by itself before it waited.
        own_mean_s: [P], of the mean step: a pause of one step is in it, and not in the middle.
        num_rows: that its experts got in the mean step, all layers.
        num_tokens: that it brought to the mean step.
        num_context_tokens: whose KV its attention read in the mean step; 0: not told.
        first_waits_s: [P][R], as `waits_s`, until the first of what a source sends is there; empty
            where that is not told apart from the last.
    """

    number: int
    waits_s: Sequence[Sequence[float]]
    own_s: Sequence[float]
    own_mean_s: Sequence[float]
    num_rows: float
    num_tokens: float
    num_context_tokens: float = 0.0
    first_waits_s: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitWindow:
    """The last blocks of all ranks of an instance.

    Attributes:
        first_block: number of the first of them.
        waits_s: [B, P, R, R] of the middle steps: how long a receiver waited for a source.
        first_waits_s: [B, P, R, R] the same until the first of what the source sends was there; as
            `waits_s` where that is not told apart.
        own_s: [B, P, R] of the middle steps.
        own_mean_s: [B, P, R] of the mean step.
        num_rows: [B, R] a step.
        num_tokens: [B, R] a step.
        num_context_tokens: [B, R] a step.
    """

    waits_s: Floats
    first_waits_s: Floats
    own_s: Floats
    own_mean_s: Floats
    num_rows: Floats
    num_tokens: Floats
    num_context_tokens: Floats
    first_block: int = 0

    @property
    def num_ranks(self) -> int:
        """R."""
        return int(self.own_s.shape[2])

    @property
    def step_s(self) -> float:
        """What a step takes: own work and the longest wait of every phase, of the median rank."""
        waited = self.waits_s.max(axis=3)
        return float(np.median((self.own_s + waited).sum(axis=1)))

    def newest(self, num_blocks: int) -> WaitWindow:
        """Return the window of the last blocks of this one."""
        num_left = max(0, len(self.own_s) - num_blocks)
        return WaitWindow(
            first_block=self.first_block + num_left,
            **{name: getattr(self, name)[num_left:] for name in _ARRAYS},
        )

    def joined(self, num_blocks: int) -> WaitWindow:
        """Return a window of longer blocks: the means of so many neighbours, the newest last."""
        whole = self.newest(len(self.own_s) // num_blocks * num_blocks)

        def join(figures: Floats) -> Floats:
            return np.asarray(figures.reshape(-1, num_blocks, *figures.shape[1:]).mean(axis=1))

        return WaitWindow(
            first_block=whole.first_block,
            **{name: join(getattr(whole, name)) for name in _ARRAYS},
        )

    def wait_shares(self) -> Floats:
        """Return [R, R]: a receiver's wait for a source, as a share of a step, all phases."""
        waited = np.median(self.waits_s, axis=0).sum(axis=0)
        return np.asarray(waited / self.step_s) if self.step_s else np.zeros_like(waited)


_ARRAYS: Final = tuple(name for name in WaitWindow.__dataclass_fields__ if name != "first_block")


def joined_in_time(before: WaitWindow, behind: WaitWindow) -> WaitWindow:
    """Return the window of the blocks of both, which follow one another."""
    return WaitWindow(
        first_block=before.first_block,
        **{
            name: np.concatenate([getattr(before, name), getattr(behind, name)]) for name in _ARRAYS
        },
    )


def window_of(
    blocks: Mapping[int, Sequence[RankBlock]],
    num_ranks: int,
    *,
    most: int = BLOCKS_OF_WINDOW,
) -> WaitWindow | None:
    """Return the newest blocks that all ranks have told; None where there are too few.

    Args:
        blocks: of every rank, of one life of the instance, in any order.
        num_ranks: R.
        most: blocks of the window, which has `BLOCKS_OF_WINDOW` at least.
    """
    by_number = [
        {
            block.number: block
            for block in blocks.get(rank, ())
            if len(block.waits_s[0]) == num_ranks
        }
        for rank in range(num_ranks)
    ]
    common = set(by_number[0]).intersection(*by_number[1:])
    numbers = sorted(common)[-most:]
    if len(numbers) < BLOCKS_OF_WINDOW:
        return None
    rows = [[of_rank[number] for of_rank in by_number] for number in numbers]
    firsts = [[b.first_waits_s or b.waits_s for b in row] for row in rows]
    return WaitWindow(
        first_block=numbers[0],
        waits_s=np.array([[b.waits_s for b in row] for row in rows]).transpose(0, 2, 1, 3),
        first_waits_s=np.array(firsts).transpose(0, 2, 1, 3),
        own_s=np.array([[b.own_s for b in row] for row in rows]).transpose(0, 2, 1),
        own_mean_s=np.array([[b.own_mean_s for b in row] for row in rows]).transpose(0, 2, 1),
        num_rows=np.array([[b.num_rows for b in row] for row in rows], dtype=float),
        num_tokens=np.array([[b.num_tokens for b in row] for row in rows], dtype=float),
        num_context_tokens=np.array(
            [[b.num_context_tokens for b in row] for row in rows], dtype=float
        ),
    )
