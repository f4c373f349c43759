"""What the router counts, by model where it is of requests (`model_metrics` binds those series)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.distribution import Distribution
from router.metrics.ranks import RankMetrics
from router.metrics.shared import SharedMetrics
from router.metrics.tally import CountTally
from router.metrics.tiers import TierMetrics
from router.pool.members import Member, Role
from runtime.metrics.core import (
    ITL_BUCKETS_S,
    LATENCY_BUCKETS_S,
    LENGTH_BUCKETS,
    REQUEST_BUCKETS_S,
    TTFT_BUCKETS_S,
    render_metrics,
    start_at_zero,
)
from runtime.metrics.process import ProcessMetrics
from runtime.metrics.vllm_names import VllmNames

_OF_KEYS = ("key", "outcome")
MAX_KEY_LABELS = 2000
"""Names of keys that metrics tell apart in the life of a process."""
OTHER_KEYS = "other keys"


class RouterMetrics:
    """All metrics of one router process, on a registry of its own."""

    def __init__(self, shared_dir: str | None = None) -> None:
        """``shared_dir``: PROMETHEUS_MULTIPROC_DIR of several processes on one port."""
        self._shared_dir = shared_dir
        self.registry = CollectorRegistry()
        self._vllm: VllmNames | None = None
        self.process = ProcessMetrics(self.registry)
        self._requests = self._counter(
            "pd_router_requests",
            "HTTP answers of the generation endpoints",
            "model",
            "endpoint",
            "status",
        )
        self._answers: dict[tuple[str, str, int], CountTally] = {}
        """What ``_requests`` is still to be told of, by its labels."""
        self._errors = self._counter("pd_router_request_errors", "Failed requests", "code")
        self.migrations = self._of_model(
            "pd_router_migrations", "Requests that went on at other workers", "reason"
        )
        self.room_moves = self._of_model(
            "pd_router_room_moves", "Requests that left a full decode rank for one with room"
        )
        self.finished = self._of_model(
            "pd_router_choices_finished", "Choices that ended by themselves", "reason"
        )
        self.lost_aborts = self._counter(
            "pd_router_lost_aborts", "Ends of requests that a living worker never heard of"
        )
        self.tokens = self._of_model("pd_router_tokens", "Tokens of prompts and outputs", "kind")
        self._models: dict[str, Callable[[], None]] = {}
        self._add_times()
        self._add_lengths()
        self._add_gauges()
        self._add_keys()
        self.tiers = TierMetrics(self.registry)
        self.ranks = RankMetrics(self.registry)

    def _add_times(self) -> None:
        self.stages = Distribution(
            "pd_ttft_stage_seconds",
            "Where the time to the first token, and to the second, went",
            ["model", "stage"],
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
        self.migration = Histogram(
            "pd_router_migration_seconds",
            "From the loss of a request's workers to its next token",
            ["model"],
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )

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
            "pd_router_requests_in_flight", "Choices in the workers' hands", "livesum", "model"
        )
        self.requests_waiting = self._gauge(
            "pd_router_requests_waiting",
            "Requests that wait for a place in flight",
            "livesum",
            "model",
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
            ["model", "role", "state"],
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
        self._key_cpu = self._counter(
            "pd_router_key_cpu_seconds",
            "CPU time for texts, grammars and masks of grammars by API key",
            "key",
        )
        self._keys = self._gauge("pd_router_keys", "API keys in force", "livemax")
        self._keys_stale = self._gauge(
            "pd_router_keys_stale", "1 while the file of API keys cannot be used", "livemax"
        )
        self._keys_of_unknown_tiers = self._gauge(
            "pd_router_keys_of_unknown_tiers",
            "API keys that name a tier of service which is not configured",
            "livemax",
        )
        self._named_keys: set[str] = set()

    def text(self) -> bytes:
        """All metrics in the text format; with a shared folder, the sums over all processes."""
        return render_metrics(self.sums(), self._vllm)

    def settle(self) -> None:
        """Hand over what the paths of all models' requests have added up."""
        for settle in self._models.values():
            settle()
        for tally in self._answers.values():
            tally.settle()

    def sums(self) -> CollectorRegistry:
        """What to read all metrics of; with a shared folder, the sums over all processes."""
        self.settle()
        if self._shared_dir is None:
            return self.registry
        registry = CollectorRegistry()
        registry.register(SharedMetrics(self._shared_dir))
        return registry

    def add_model(self, name: str, settle: Callable[[], None]) -> None:
        """Export the series of a model; ``settle`` hands over what its requests have added up."""
        self._models[name] = settle

    def introduce(self, models: Sequence[str]) -> None:
        """Say which models this router serves; the first is whose requests name none."""
        for model in models:
            self.process.tell(role="router", model=model)
        self._vllm = VllmNames(role="router", model=models[0], further_models=models[1:])

    def expect(
        self, endpoints: Iterable[str], statuses: Iterable[int], codes: Iterable[str]
    ) -> None:
        """Export these answers and failures before any of them has happened."""
        start_at_zero(self._requests, self._models, endpoints, map(str, statuses))
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
        self.settle()
        return _totals(self._requests, "status")

    def set_workers(self, members: Iterable[Member]) -> None:
        """Count the pool's members by model, role and state."""
        states = ("ready", "draining")
        counts = {
            (model, role.value, state): 0
            for model in self._models
            for role in Role
            for state in states
        }
        for member in members:
            counts[member.model, member.role.value, states[member.draining]] += 1
        for labels, count in counts.items():
            self._workers.labels(*labels).set(count)

    def count_request(self, model: str, endpoint: str, status: int) -> None:
        """One answer; ``model`` is "" where the request has asked for none that is here."""
        key = model, endpoint, status
        tally = self._answers.get(key)
        if tally is None:
            series = self._requests.labels(model, endpoint, str(status))
            tally = self._answers[key] = CountTally(series)
        tally.inc()

    def count_error(self, code: str) -> None:
        """One failure, also within a stream that began with status 200."""
        self._errors.labels(code).inc()

    def set_keys(self, number: int, *, is_stale: bool) -> None:
        """How many keys are in force, and whether they are those of the file as it is now."""
        self._keys.set(number)
        self._keys_stale.set(is_stale)

    def set_keys_of_unknown_tiers(self, number: int) -> None:
        """How many keys name a tier that is not configured."""
        self._keys_of_unknown_tiers.set(number)

    def count_key_request(self, key: str, outcome: str) -> None:
        """One request of a key, by its name; "" where it is nobody's."""
        self._key_requests.labels(self._label_of_key(key), outcome).inc()

    def count_key_tokens(self, key: str, num_prompt: int, num_output: int) -> None:
        """What one request has used, at its end."""
        label = self._label_of_key(key)
        self._key_tokens.labels(label, "prompt").inc(num_prompt)
        self._key_tokens.labels(label, "output").inc(num_output)

    def count_key_cpu(self, key: str, cpu_s: float) -> None:
        """Seconds of CPU that requests of a key have taken here."""
        self._key_cpu.labels(self._label_of_key(key)).inc(cpu_s)

    def _label_of_key(self, key: str) -> str:
        """The name itself for the first that come: files change, and series are never forgotten."""
        if key not in self._named_keys:
            if len(self._named_keys) >= MAX_KEY_LABELS:
                return OTHER_KEYS
            self._named_keys.add(key)
        return key

    def _gauge(
        self, name: str, documentation: str, mode: Literal["livesum", "livemax"], *labels: str
    ) -> Gauge:
        return Gauge(name, documentation, labels, registry=self.registry, multiprocess_mode=mode)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, registry=self.registry)

    def _of_model(self, name: str, documentation: str, *labels: str) -> Counter:
        return self._counter(name, documentation, "model", *labels)

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Distribution:
        return Distribution(name, documentation, ["model"], buckets=buckets, registry=self.registry)


def _totals(counter: Counter, label: str) -> dict[str, int]:
    """What ``counter`` has counted, by one of its labels; what never happened is left out."""
    totals: dict[str, int] = {}
    for family in counter.collect():
        for sample in family.samples:
            if sample.value and sample.name.endswith("_total"):
                value = sample.labels[label]
                totals[value] = totals.get(value, 0) + int(sample.value)
    return totals
