"""What the router's judge says of blocks that ranks recorded, look by look, and how it is told."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence

from bench.ranks.faults import Place
from runtime.stragglers.rank_judge import MOST_BLOCKS, RankJudge
from runtime.stragglers.rank_waits import BLOCKS_OF_WINDOW, RankBlock, window_of
from runtime.stragglers.slow_ranks import Finding, describe_finding

Blocks = Mapping[int, Sequence[RankBlock]]
"""Of every rank, as many of each, in the order of time."""
Looks = Sequence[Sequence[Finding]]


class JudgedBlocks:
    """Blocks of one instance, of one stretch of steps after another, as if they were one.

    Only the newest are kept, however long it goes on.
    """

    def __init__(self, usual: Blocks) -> None:
        """Begin.

        Args:
            usual: blocks without a fault that ran before: the router has seen such, too.
        """
        self._judge = RankJudge()
        self._newest: dict[int, deque[RankBlock]] = {
            rank: deque(maxlen=MOST_BLOCKS) for rank in usual
        }
        self._num_blocks = 0
        self._num_skipped = BLOCKS_OF_WINDOW - 1
        self._take(usual, BLOCKS_OF_WINDOW)
        self._num_skipped = self._num_blocks + BLOCKS_OF_WINDOW - 1

    def hear(self, blocks: Blocks, *, every: int = 1) -> list[list[Finding]]:
        """Return what is found in the first 100 steps behind the usual ones, and in later ones.

        Args:
            blocks: that follow those before.
            every: of so many blocks there is a look.
        """
        return self._take(blocks, every)

    def _take(self, blocks: Blocks, every: int) -> list[list[Finding]]:
        found = []
        for of_ranks in zip(*(blocks[rank] for rank in self._newest), strict=True):
            for newest, block in zip(self._newest.values(), of_ranks, strict=True):
                newest.append(dataclasses.replace(block, number=self._num_blocks))
            self._num_blocks += 1
            if self._num_blocks > self._num_skipped and self._num_blocks % every == 0:
                window = window_of(self._newest, len(self._newest), most=MOST_BLOCKS)
                assert window is not None
                found.append(self._judge.look(window))
        return found


def alarms_of(windows: Looks, expected: frozenset[Place]) -> list[object]:
    """Return the faults that are none, with the number of the window."""
    return [
        [number, report_finding(each)]
        for number, found in enumerate(windows)
        for each in found
        if each.kind.is_fault and (each.kind, each.rank, each.source) not in expected
    ]


def report_finding(finding: Finding) -> Mapping[str, object]:
    """Return it for a report: of its evidence, digits that mean something."""
    evidence = {name: float(f"{value:.4g}") for name, value in finding.evidence.items()}
    return {**describe_finding(finding), "evidence": evidence}


def longest_alarm(looks: Looks) -> int:
    """Return in how many looks behind one another there was a fault: the alert waits 5 minutes."""
    longest = now = 0
    for found in looks:
        now = now + 1 if any(each.kind.is_fault for each in found) else 0
        longest = max(longest, now)
    return longest


def show_looks(windows: Looks) -> str:
    """Return it in words, for a line."""
    texts = [
        f"{each.kind.value} {each.rank}"
        + (f" from {each.source}" if each.source >= 0 else "")
        + f" x{each.ratio:.3f}"
        for found in windows
        for each in found
    ]
    return ", ".join(texts) or "nothing"
