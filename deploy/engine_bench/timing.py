"""Times of steps that follow each other: between their ends on the host, idle on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from engine.runner import PendingStep


def distances(ends: Sequence[float]) -> list[float]:
    """Seconds from each moment to the next."""
    return [after - before for before, after in pairwise(ends)]


def idle_between(steps: Sequence[PendingStep | None]) -> list[float]:
    """Seconds that the device idled before each step but the first; all must be over.

    Empty where nobody knows: on a CPU, and where a rank only takes part in another's steps.
    """
    spans = [step.span for step in steps if step is not None]
    return [
        after.gap_after(before)
        for before, after in pairwise(spans)
        if before is not None and after is not None
    ]
