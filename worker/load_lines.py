"""One line of the log every ten seconds in which a rank did something: its load and its speed.

From what the rank publishes anyway, on a timer: a step costs nothing more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from runtime.logging import fields, get_logger
from runtime.pb import registry_pb2

logger = get_logger(__name__)

INTERVAL_S = 10.0
TOKENS = ("pd_prefill_step_tokens_sum", "pd_decode_generated_tokens_total")
"""Tokens that steps computed, or sampled."""


def num_tokens(registry: CollectorRegistry) -> float:
    """Tokens of all steps since the start."""
    families = registry.restricted_registry(TOKENS).collect()
    return sum(s.value for family in families for s in family.samples if s.name in TOKENS)


async def tell_load(
    registry: CollectorRegistry,
    load: Callable[[], registry_pb2.WorkerLoad],
    *,
    interval_s: float = INTERVAL_S,
) -> None:
    """Write the lines until cancelled."""
    told, told_at = num_tokens(registry), time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        total, now = num_tokens(registry), time.monotonic()
        if line := load_line(load(), total - told, now - told_at):
            logger.info("%s", line)
        told, told_at = total, now


def load_line(load: registry_pb2.WorkerLoad, num_tokens: float, seconds: float) -> str:
    """What is worth saying of so many seconds; empty where nothing happened."""
    running, waiting = load.num_requests_running, load.num_requests_waiting
    if not (num_tokens or running or waiting):
        return ""
    used = load.num_total_blocks - load.num_free_blocks
    share = used / load.num_total_blocks if load.num_total_blocks else 0.0
    numbers = fields(
        running=running,
        waiting=waiting,
        kv_used=f"{share:.1%}",
        tokens_per_s=round(num_tokens / seconds, 1),
    )
    return f"load of the last {seconds:.0f} s {numbers}"
