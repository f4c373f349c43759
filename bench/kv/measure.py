"""Starts the two processes of ``sides``, and makes numbers of their times."""

from __future__ import annotations

import multiprocessing
import os
import platform
import statistics
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from bench.kv.memory import BLOCKS_PER_PROMPT, LAYOUT, PROMPT_BYTES, measure_plain_copy
from bench.kv.sides import BenchPlan, BenchTimes, run_decode, run_prefill
from runtime.errors import InternalError

_JOIN_TIMEOUT_S = 60.0
_ENVIRONMENT = ("UCX_", "MC_", "NIXL_")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """One transport. Rates in GB/s (10**9 bytes), times in seconds."""

    name: str
    value: float
    """Median rate of a single prompt, from push to arrival."""
    unit: str
    bound: float
    """Median rate of a plain copy of the same bytes in the same run."""
    best: float
    wire_median: float
    wire_best: float
    """While posts were in flight: without the way into and out of the sender's thread."""
    sustained: float
    exposed_s: float
    """Median, of overlapped prompts: from the end of the (simulated) computation to the arrival."""
    exposed_share: float
    """The same, of computation and exposed time together."""
    longest_call_s: float
    longest_tick_s: float
    longest_idle_tick_s: float
    settings: dict[str, object]


def measure_transfer(plan: BenchPlan, bound: float | None = None) -> BenchResult:
    """Run ``plan`` once, the plain copy first unless its rate is given.

    Raises:
        InternalError: a process failed, or the KV that arrived is not what was sent.
    """
    if bound is None:
        bound = statistics.median(measure_plain_copy(plan.devices, repeat=7)[2:]) / 1e9
    times = _run_processes(plan)
    rates = [PROMPT_BYTES / seconds / 1e9 for seconds in times.prompts]
    wire = [PROMPT_BYTES / seconds / 1e9 for seconds in times.wire]
    exposed = statistics.median(times.exposed) if times.exposed else 0.0
    return BenchResult(
        name=f"kv_transfer/{plan.transport}",
        value=round(statistics.median(rates), 3),
        unit="GB/s",
        bound=round(bound, 3),
        best=round(max(rates), 3),
        wire_median=round(statistics.median(wire), 3),
        wire_best=round(max(wire), 3),
        sustained=round(plan.num_sustained * PROMPT_BYTES / times.sustained / 1e9, 3),
        exposed_s=round(exposed, 6),
        exposed_share=round(exposed / (plan.compute_s + exposed), 5),
        longest_call_s=round(times.longest_call, 6),
        longest_tick_s=round(times.longest_tick, 6),
        longest_idle_tick_s=round(times.longest_idle_tick, 6),
        settings=_settings(plan),
    )


def _settings(plan: BenchPlan) -> dict[str, object]:
    environment = {k: v for k, v in sorted(os.environ.items()) if k.startswith(_ENVIRONMENT)}
    return {
        **asdict(plan),
        "layout": LAYOUT.describe(),
        "blocks_per_prompt": BLOCKS_PER_PROMPT,
        "bytes_per_prompt": PROMPT_BYTES,
        "num_cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "environment": environment,
    }


def _run_processes(plan: BenchPlan) -> BenchTimes:
    context = multiprocessing.get_context("spawn")
    decode_end, prefill_end = context.Pipe()
    results, results_end = context.Pipe(duplex=False)
    decode = context.Process(target=run_decode, args=(plan, decode_end), daemon=True)
    prefill = context.Process(
        target=run_prefill, args=(plan, prefill_end, results_end), daemon=True
    )
    decode.start()
    prefill.start()
    for end in (decode_end, prefill_end, results_end):
        end.close()  # so that a process that ends is noticed at the other
    try:
        times = _receive(results)
    finally:
        for process in (prefill, decode):
            process.join(_JOIN_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
    return times


def _receive(results: Connection) -> BenchTimes:
    try:
        times: BenchTimes = results.recv()
    except EOFError as error:
        raise InternalError("a process of the measurement failed; its message is above") from error
    return times
