"""How long work takes on the GPU: the median of device events."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def median_seconds(
    call: Callable[[], object],
    repeats: int = 15,
    *,
    warm_up: int = 3,
    before: Callable[[], object] | None = None,
) -> float:
    """Return the median device seconds of a call, after `warm_up` calls that are not timed.

    `before` runs ahead of every timed call and is not timed.
    """
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        if before is not None:
            before()
        first, last = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(float(first.elapsed_time(last)) / 1e3)
    return statistics.median(times)
