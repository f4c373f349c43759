"""Looking at the ranks of an instance again and again: what windows before have shown of the noise.

The last 100 steps are looked at, and the last 300 as blocks of 60: what is hardly more than the
noise of the one stands out of the other. Each scale remembers the noise of its windows before, of
blocks that are not looked at any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from runtime.stragglers.excess import WindowNoise
from runtime.stragglers.rank_waits import BLOCKS_OF_WINDOW, WaitWindow
from runtime.stragglers.slow_ranks import Finding, look_at

SCALES: Final = (1, 3)
"""Blocks that are taken as one."""
MOST_BLOCKS: Final = BLOCKS_OF_WINDOW * max(SCALES)
"""That a look needs at most, the newest."""
KEPT_WINDOWS: Final = 10
"""Whose noise is remembered: from then on a threshold hardly falls any more."""


@dataclass(slots=True)
class _Scale:
    end_block: int = 0  # behind the newest window whose noise is kept
    last: WindowNoise | None = None
    before: deque[WindowNoise] = field(default_factory=lambda: deque(maxlen=KEPT_WINDOWS))

    def look(self, window: WaitWindow, end_block: int) -> Sequence[Finding]:
        is_new = window.first_block >= self.end_block
        if is_new and self.last is not None:
            self.before.append(self.last)
            self.last = None
        seen = look_at(window, tuple(self.before))
        if self.last is None:
            self.end_block, self.last = end_block, seen.noise
        return seen.findings


class RankJudge:
    """Of one life of an instance."""

    def __init__(self) -> None:
        """Know of nothing before."""
        self._scales = {scale: _Scale() for scale in SCALES}

    def look(self, window: WaitWindow) -> list[Finding]:
        """Return what slows the ranks of an instance down now, the worst first.

        Args:
            window: up to `MOST_BLOCKS`, no older than those of the look before.

        Raises:
            ValueError: there are fewer than two ranks, or no blocks.
        """
        found: dict[tuple[object, int, int], Finding] = {}
        end_block = window.first_block + len(window.own_s)
        for scale, state in self._scales.items():
            if len(window.own_s) < scale * BLOCKS_OF_WINDOW:
                continue
            part = window.newest(scale * BLOCKS_OF_WINDOW).joined(scale)
            for finding in state.look(part, end_block):
                found.setdefault((finding.kind, finding.rank, finding.source), finding)
        return sorted(found.values(), key=lambda finding: -finding.share)
