"""One batch under torch's profiler: the least times of its stages, then what they took.

The trace goes through a temporary file, the only form in which torch gives all of it away.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from deploy.engine_bench.session import Session
from deploy.engine_bench.stages import BatchProfile, summarise
from deploy.engine_bench.trace import read_spans
from engine.stage_timer import TimerMode

_MEASURED = "measured batch"


def profile_batch(session: Session, run: Callable[[], object]) -> BatchProfile | None:
    """Run a batch on all ranks under the profiler of rank 0, and say where its time went.

    Args:
        session: of this rank.
        run: a batch, waited for.

    Returns:
        None on other ranks.
    """
    timer = session.timer
    if session.device.type == "cuda":  # bounds are those of a GPU
        timer.mode = TimerMode.BOUNDS
        run()
    bounds = {name: stage.bound_s for name, stage in timer.stages.items()}
    timer.reset()
    if session.place.rank:
        timer.mode = TimerMode.OFF
        for _ in range(2):
            run()
        return None
    timer.mode = TimerMode.RANGES
    activities = [torch.profiler.ProfilerActivity.CPU]
    if session.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        run()  # the profiler's own start is paid here
        session.synchronize()
        with torch.profiler.record_function(_MEASURED):
            run()
            session.synchronize()
    timer.mode = TimerMode.OFF
    spans = read_spans(_read_trace(profiler), _MEASURED)
    return summarise(spans, bounds)


def _read_trace(profiler: torch.profiler.profile) -> list[dict[str, object]]:
    handle, name = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    path = Path(name)
    try:
        profiler.export_chrome_trace(name)
        events: list[dict[str, object]] = json.loads(path.read_bytes())["traceEvents"]
    finally:
        path.unlink()
    return events
