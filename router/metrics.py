"""What the router counts. Label children are bound once: the token path only adds numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

from router.pool.members import Member, Role
from runtime.errors import ErrorCode
from runtime.metrics import LATENCY_BUCKETS_S, render_metrics

ITL_BUCKETS_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 8.0),
)
TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 163840)
STAGES = (
    "router",
    "reserve",
    "prefill_queue",
    "prefill_compute",
    "kv_transfer",
    "decode_admission",
)


class RouterMetrics:
    """All metrics of one router process, on a registry of its own."""

    def __init__(self, shared_dir: str | None = None) -> None:
        """``shared_dir``: PROMETHEUS_MULTIPROC_DIR of several processes on one port."""
        self._shared_dir = shared_dir
        self.registry = CollectorRegistry()
        self._requests = self._counter(
            "pd_router_requests", "HTTP answers of the generation endpoints", "endpoint", "status"
        )
        self._errors = self._counter("pd_router_request_errors", "Failed requests", "code")
        self._migrations = self._counter(
            "pd_router_migrations", "Requests that went on at other workers", "reason"
        )
        self.lost_aborts = self._counter(
            "pd_router_lost_aborts", "Ends of requests that a living worker never heard of"
        )
        self._tokens = self._counter("pd_router_tokens", "Tokens of prompts and outputs", "kind")
        self._stages = Histogram(
            "pd_ttft_stage_seconds",
            "Where the time to the first token, and to the second, went",
            ["stage"],
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.ttft = self._histogram("pd_ttft_seconds", "Arrival to first token", LATENCY_BUCKETS_S)
        self.itl = self._histogram("pd_itl_seconds", "Between deliveries of tokens", ITL_BUCKETS_S)
        self.e2e = self._histogram("pd_e2e_seconds", "Arrival to last token", LATENCY_BUCKETS_S)
        self.migration = self._histogram(
            "pd_router_migration_seconds",
            "From the loss of a request's workers to its next token",
            LATENCY_BUCKETS_S,
        )
        self.prompt_lengths = self._histogram(
            "pd_request_prompt_tokens", "Tokens of a prompt", TOKEN_BUCKETS
        )
        self.prompt_tokens = self._tokens.labels("prompt")
        self.cached_tokens = self._tokens.labels("cached")
        self.output_tokens = self._tokens.labels("output")
        self._stage = {name: self._stages.labels(name) for name in STAGES}
        self.in_flight = self._gauge(
            "pd_router_requests_in_flight", "Choices in the workers' hands", "livesum"
        )
        self.requests_waiting = self._gauge(
            "pd_router_requests_waiting", "Requests that wait for a place in flight", "livesum"
        )
        self.connections = self._gauge("pd_router_connections", "Open HTTP connections", "livesum")
        self.texts_pending = self._gauge(
            "pd_router_texts_pending", "Texts that wait for a thread or are in one", "livesum"
        )
        self.loop_lag = self._gauge(
            "pd_router_event_loop_lag_seconds", "How late the event loop ran a timer", "livemax"
        )
        self._workers = Gauge(
            "pd_router_workers",
            "Workers of the pool",
            ["role", "state"],
            registry=self.registry,
            multiprocess_mode="livemax",
        )

    def text(self) -> bytes:
        """All metrics in the text format; with a shared folder, the sums over all processes."""
        return render_metrics(self.sums())

    def sums(self) -> CollectorRegistry:
        """What to read all metrics of; with a shared folder, the sums over all processes."""
        if self._shared_dir is None:
            return self.registry
        registry = CollectorRegistry()
        MultiProcessCollector(registry, self._shared_dir)  # type: ignore[no-untyped-call]
        return registry

    def set_workers(self, members: Iterable[Member]) -> None:
        """Count the pool's members by role and state."""
        counts = {(role.value, state): 0 for role in Role for state in ("ready", "draining")}
        for member in members:
            counts[member.role.value, "draining" if member.draining else "ready"] += 1
        for labels, count in counts.items():
            self._workers.labels(*labels).set(count)

    def count_request(self, endpoint: str, status: int) -> None:
        """One answer."""
        self._requests.labels(endpoint, str(status)).inc()

    def count_error(self, code: str) -> None:
        """One failure, also within a stream that began with status 200."""
        self._errors.labels(code).inc()

    def count_migration(self, reason: ErrorCode) -> None:
        """One more attempt of a request."""
        self._migrations.labels(reason.name.lower()).inc()

    def observe_stages(self, split: dict[str, float]) -> None:
        """One finished choice's seconds by stage (keys end in ``_s``)."""
        for name, stage in self._stage.items():
            value = split.get(f"{name}_s")
            if value is not None:
                stage.observe(value)

    def _gauge(self, name: str, documentation: str, mode: Literal["livesum", "livemax"]) -> Gauge:
        return Gauge(name, documentation, registry=self.registry, multiprocess_mode=mode)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, buckets=buckets, registry=self.registry)
