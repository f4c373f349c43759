"""What the router counts. Label children are bound once: the token path only adds numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.pool.members import Member, Role
from router.shared_metrics import SharedMetrics
from router.tally import DeliveryTally
from router.tier_metrics import TierMetrics
from runtime.errors import ErrorCode
from runtime.metrics import (
    ITL_BUCKETS_S,
    LATENCY_BUCKETS_S,
    LENGTH_BUCKETS,
    REQUEST_BUCKETS_S,
    TTFT_BUCKETS_S,
    render_metrics,
    start_at_zero,
)
from runtime.process_metrics import ProcessMetrics
from runtime.vllm_names import VllmNames

STAGES = (
    "router",
    "reserve",
    "prefill_queue",
    "prefill_compute",
    "kv_transfer",
    "decode_admission",
)
_OF_KEYS = ("key", "outcome")
MAX_KEY_LABELS = 2000
"""Names of keys that metrics tell apart in the life of a process."""
OTHER_KEYS = "other keys"
_BEFORE_INFERENCE = ("router_s", "reserve_s", "prefill_queue_s")


class RouterMetrics:
    """All metrics of one router process, on a registry of its own."""

    def __init__(self, shared_dir: str | None = None) -> None:
        """``shared_dir``: PROMETHEUS_MULTIPROC_DIR of several processes on one port."""
        self._shared_dir = shared_dir
        self.registry = CollectorRegistry()
        self._vllm: VllmNames | None = None
        self.process = ProcessMetrics(self.registry)
        self._requests = self._counter(
            "pd_router_requests", "HTTP answers of the generation endpoints", "endpoint", "status"
        )
        self._errors = self._counter("pd_router_request_errors", "Failed requests", "code")
        self._migrations = self._counter(
            "pd_router_migrations", "Requests that went on at other workers", "reason"
        )
        self.room_moves = self._counter(
            "pd_router_room_moves", "Requests that left a full decode rank for one with room"
        )
        start_at_zero(self._migrations, (code.name.lower() for code in ErrorCode))
        self._finished = self._counter(
            "pd_router_choices_finished", "Choices that ended by themselves", "reason"
        )
        start_at_zero(self._finished, ("stop", "length", "tool_calls"))
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
        self.ttft = self._histogram("pd_ttft_seconds", "Arrival to first token", TTFT_BUCKETS_S)
        self.itl = self._histogram("pd_itl_seconds", "Between deliveries of tokens", ITL_BUCKETS_S)
        self.e2e = self._histogram("pd_e2e_seconds", "Arrival to last token", REQUEST_BUCKETS_S)
        self.tpot = self._histogram(
            "pd_tpot_seconds", "Of a choice, a token after its first, in the mean", ITL_BUCKETS_S
        )
        self.inference = self._histogram(
            "pd_inference_seconds", "From the first chunk of prefill to the end", REQUEST_BUCKETS_S
        )
        self.migration = self._histogram(
            "pd_router_migration_seconds",
            "From the loss of a request's workers to its next token",
            LATENCY_BUCKETS_S,
        )
        self.prompt_tokens = self._tokens.labels("prompt")
        self.cached_tokens = self._tokens.labels("cached")
        self.output_tokens = self._tokens.labels("output")
        self.deliveries = DeliveryTally(self.output_tokens, self.itl)
        self._stage = {name: self._stages.labels(name) for name in STAGES}
        self._add_lengths()
        self._add_gauges()
        self._add_keys()
        self.tiers = TierMetrics(self.registry)

    def _add_lengths(self) -> None:
        self.prompt_lengths = self._histogram(
            "pd_request_prompt_tokens", "Tokens of a prompt", LENGTH_BUCKETS
        )
        self.output_lengths = self._histogram(
            "pd_request_output_tokens", "Tokens of a choice", LENGTH_BUCKETS
        )
        self.max_lengths = self._histogram(
            "pd_request_max_tokens", "Most tokens that a choice may have", LENGTH_BUCKETS
        )

    def _add_gauges(self) -> None:
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

    def _add_keys(self) -> None:
        self._key_requests = self._counter(
            "pd_router_key_requests", "Requests by API key, and why they were refused", *_OF_KEYS
        )
        self._key_tokens = self._counter(
            "pd_router_key_tokens", "Tokens of prompts and outputs by API key", "key", "kind"
        )
        self._keys = self._gauge("pd_router_keys", "API keys in force", "livemax")
        self._keys_stale = self._gauge(
            "pd_router_keys_stale", "1 while the file of API keys cannot be used", "livemax"
        )
        self._named_keys: set[str] = set()

    def text(self) -> bytes:
        """All metrics in the text format; with a shared folder, the sums over all processes."""
        return render_metrics(self.sums(), self._vllm)

    def sums(self) -> CollectorRegistry:
        """What to read all metrics of; with a shared folder, the sums over all processes."""
        self.deliveries.settle()
        if self._shared_dir is None:
            return self.registry
        registry = CollectorRegistry()
        registry.register(SharedMetrics(self._shared_dir))
        return registry

    def introduce(self, model: str) -> None:
        """Say which model this router serves."""
        self.process.tell(role="router", model=model)
        self._vllm = VllmNames(role="router", model=model)

    def expect(
        self, endpoints: Iterable[str], statuses: Iterable[int], codes: Iterable[str]
    ) -> None:
        """Export these answers and failures before any of them has happened."""
        start_at_zero(self._requests, endpoints, map(str, statuses))
        start_at_zero(self._errors, codes)

    @property
    def shared_dir(self) -> str | None:
        """What several processes on one port share; None for one alone."""
        return self._shared_dir

    def errors(self) -> dict[str, int]:
        """Failed requests of this process by code."""
        return _totals(self._errors, "code")

    def answers(self) -> dict[str, int]:
        """Answers of this process's generation endpoints by HTTP status."""
        return _totals(self._requests, "status")

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

    def set_keys(self, number: int, *, is_stale: bool) -> None:
        """How many keys are in force, and whether they are those of the file as it is now."""
        self._keys.set(number)
        self._keys_stale.set(is_stale)

    def count_key_request(self, key: str, outcome: str) -> None:
        """One request of a key, by its name; "" where it is nobody's."""
        self._key_requests.labels(self._label_of_key(key), outcome).inc()

    def count_key_tokens(self, key: str, num_prompt: int, num_output: int) -> None:
        """What one request has used, at its end."""
        label = self._label_of_key(key)
        self._key_tokens.labels(label, "prompt").inc(num_prompt)
        self._key_tokens.labels(label, "output").inc(num_output)

    def _label_of_key(self, key: str) -> str:
        """The name itself for the first that come: files change, and series are never forgotten."""
        if key not in self._named_keys:
            if len(self._named_keys) >= MAX_KEY_LABELS:
                return OTHER_KEYS
            self._named_keys.add(key)
        return key

    def choice_finished(
        self, reason: str, split: Mapping[str, float], *, num_tokens: int, max_tokens: int
    ) -> None:
        """One choice that ended by itself.

        Args:
            reason: why.
            split: its seconds by stage (keys end in ``_s``).
            num_tokens: of its output.
            max_tokens: that it might have had.
        """
        self._finished.labels(reason).inc()
        self.output_lengths.observe(num_tokens)
        self.max_lengths.observe(max_tokens)
        total_s = split["total_s"]
        self.e2e.observe(total_s)
        if num_tokens > 1:
            self.tpot.observe((total_s - split["ttft_s"]) / (num_tokens - 1))
        if "prefill_queue_s" in split:
            before_s = sum(split.get(stage, 0.0) for stage in _BEFORE_INFERENCE)
            self.inference.observe(max(0.0, total_s - before_s))
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


def _totals(counter: Counter, label: str) -> dict[str, int]:
    """What ``counter`` has counted, by one of its labels; what never happened is left out."""
    totals: dict[str, int] = {}
    for family in counter.collect():
        for sample in family.samples:
            if sample.value and sample.name.endswith("_total"):
                value = sample.labels[label]
                totals[value] = totals.get(value, 0) + int(sample.value)
    return totals
