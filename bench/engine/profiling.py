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

from bench.engine.session import Session
from bench.engine.stages import BatchProfile, summarise
from bench.engine.trace import read_spans, stage_names
from bench.stage_timer import TimerMode

_NAMED, _MEASURED = "named batch", "measured batch"


def profile_batch(
    session: Session, run: Callable[[], object], *, named: Callable[[], object] | None = None
) -> BatchProfile | None:
    """Run a batch on all ranks under the profiler of rank 0, and say where its time went.

    Args:
        session: of this rank.
        run: a batch, waited for.
        named: the same work one kernel at a time, if ``run`` replays graphs: it tells which
            kernels belong to which stage.

    Returns:
        None on other ranks.
    """
    bounds = _measure_bounds(session, named or run)
    if session.rank.place.rank:
        for call in (named or run, run):
            call()
        return None
    session.rank.timer.mode = TimerMode.RANGES
    activities = [torch.profiler.ProfilerActivity.CPU]
    if session.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        # The first run also pays for the profiler's own start.
        for name, call in ((_NAMED, named or run), (_MEASURED, run)):
            with torch.profiler.record_function(name):
                call()
                session.rank.synchronize()
    session.rank.timer.mode = TimerMode.OFF
    events = _read_trace(profiler)
    names = stage_names(read_spans(events, _NAMED)) if named is not None else {}
    return summarise(read_spans(events, _MEASURED, names), bounds)


def _measure_bounds(session: Session, run: Callable[[], object]) -> dict[str, float]:
    """Least seconds of each stage; none where we have no data sheet of the device.

    All ranks are on devices of one kind, so all of them or none run the batch once more.
    """
    timer = session.rank.timer
    if session.device.type != "cuda" or timer.hardware is None:
        return {}
    timer.mode = TimerMode.BOUNDS
    run()
    timer.mode = TimerMode.OFF
    bounds = {name: stage.bound_s for name, stage in timer.stages.items()}
    timer.reset()
    return bounds


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
