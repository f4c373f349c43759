"""What any process says of itself: who it is, and what it takes of its host."""

from __future__ import annotations

import time

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge


class ProcessMetrics:
    """CPU time and memory, as of the last `measure`: several processes may add up in one scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Measure nothing yet."""
        self._process = psutil.Process()
        self._cpu_s = 0.0
        self._cpu = Counter(
            "pd_process_cpu_seconds", "CPU time of all threads, user and system", registry=registry
        )
        self._memory = Gauge(
            "pd_process_resident_bytes",
            "Resident memory",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._info = Gauge(
            "pd_process_info",
            "Always 1: who answers",
            ["role", "model", "worker", "rank"],
            registry=registry,
            multiprocess_mode="livemax",
        )

    def tell(self, *, role: str, model: str, worker: str = "", rank: int = 0) -> None:
        """Say who we are; a router is no `worker`."""
        self.measure()
        self._info.labels(role, model, worker or role, str(rank)).set(1)

    def measure(self) -> None:
        """Add what was used since the last call."""
        now_s = time.process_time()
        self._cpu.inc(now_s - self._cpu_s)
        self._cpu_s = now_s
        self._memory.set(self._process.memory_info().rss)
