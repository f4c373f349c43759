"""What the processes of each role export, without any of them running."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from decode.metrics import DecodeMetrics
from prefill.messages import LoopLoad
from prefill.metrics import PrefillMetrics
from router.metrics.core import RouterMetrics
from router.metrics.model import ModelMetrics
from runtime.metrics.core import gauge_of
from runtime.pb import registry_pb2
from worker.health import Health
from worker.lifecycle import DecodeStatus

BLOCK_TOKENS = 64


@dataclasses.dataclass(slots=True)
class Exports:
    """A registry by role, and what writes into it."""

    registries: dict[str, CollectorRegistry]
    prefill: PrefillMetrics
    decode: DecodeMetrics
    router: ModelMetrics


def make_exports(load: LoopLoad | None = None) -> Exports:
    """Of each role one process; prefill's queues are those of `load`."""
    prefill, decode = _worker(), _worker()
    of_prefill, of_decode, router = PrefillMetrics(prefill), DecodeMetrics(decode), RouterMetrics()
    of_prefill.watch(lambda: load or LoopLoad(), lambda: 0)
    return Exports(
        registries={"prefill": prefill, "decode": decode, "router": router.registry},
        prefill=of_prefill,
        decode=of_decode,
        router=ModelMetrics(router, "m"),
    )


def hold(decode: DecodeMetrics, *, free: int, total: int, **counts: int) -> None:
    """Have a decode rank hold requests, by status, and blocks."""
    by_status = {DecodeStatus(status): count for status, count in counts.items()}
    report = registry_pb2.WorkerLoad(num_free_blocks=free, num_total_blocks=total)
    decode.set_load(by_status, report)


def _worker() -> CollectorRegistry:
    registry = CollectorRegistry()
    loop: Any = SimpleNamespace(num_tokens=0, num_tokens_of_most=0, turn_age_s=0.0)
    loop.is_alive, loop.is_overdue = True, False
    Health(registry).watch_loop(loop)
    gauge_of(registry, "pd_worker_kv_block_tokens", "Tokens of a KV block", lambda: BLOCK_TOKENS)
    return registry
