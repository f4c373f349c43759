"""The names that vLLM gives its metrics, for dashboards, autoscalers and pickers that know those.

Nothing is counted for them: every row of the table reads, at a scrape, what we export under our own
names anyway. A role has a row where it knows the whole truth of it, and no other process counts the
same, so that sums over all processes are right; docs/use/metrics.md says which role has which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Metric

from runtime.config.decode import MAX_DRAFTS
from runtime.metrics.rows import HistogramRow, Readings, Row, Samples, by, of, plain

PREFIX = "vllm:"

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
LENGTH_BUCKETS = tuple(
    float(digit * 10**power) for power in range(6) for digit in (1, 2, 5) if power < 5 or digit < 2
)
"""1, 2, 5 to 100000 tokens."""
STEP_BUCKETS = (1.0, *(float(1 << power) for power in range(3, 15)))
"""Tokens of a step."""


def _usage(free: str, total: str) -> Callable[[Readings], Samples]:
    def held(read: Readings) -> float:
        num_blocks = read(total)
        return 1.0 - read(free) / num_blocks if num_blocks else 0.0  # not known yet

    return plain(held)


def _cache_config(total: str) -> Callable[[Readings], Samples]:
    def samples(read: Readings) -> Samples:
        block_size, num_blocks = read("pd_worker_kv_block_tokens"), read(total)
        return [({"block_size": f"{block_size:g}", "num_gpu_blocks": f"{num_blocks:.0f}"}, 1.0)]

    return samples


_WAITING = "Requests that wait, for whatever reason"
_RUNNING = "Requests in the worker's hands that do not wait"
_REASONS = "Those that wait, for room here (capacity) or for another worker (deferred)"
_USAGE = "Share of the KV blocks that are held, 0 to 1"
_CONFIG = "The KV cache's sizes, as labels"
_SOURCES = "Context tokens by where their KV came from"
_QUERIES = "Tokens that were looked up in the prefix cache"
_HITS = "Those that it had"
_GENERATED = "Tokens sampled here"
_STEP = "Tokens of a step"

PREFILL = (
    Row(
        "num_requests_waiting",
        "gauge",
        _WAITING,
        plain(
            lambda read: (
                read("pd_prefill_num_requests_waiting") + read("pd_prefill_num_requests_claiming")
            )
        ),
    ),
    Row(
        "num_requests_running",
        "gauge",
        _RUNNING,
        plain(
            lambda read: (
                read("pd_prefill_num_requests_running") + read("pd_prefill_num_requests_sending")
            )
        ),
    ),
    Row(
        "num_requests_waiting_by_reason",
        "gauge",
        _REASONS,
        by(
            "reason",
            {
                "capacity": lambda read: read("pd_prefill_num_requests_waiting"),
                "deferred": lambda read: read("pd_prefill_num_requests_claiming"),
            },
        ),
    ),
    Row(
        "kv_cache_usage_perc",
        "gauge",
        _USAGE,
        _usage("pd_prefill_num_free_blocks", "pd_prefill_num_total_blocks"),
    ),
    Row("cache_config_info", "gauge", _CONFIG, _cache_config("pd_prefill_num_total_blocks")),
    Row(
        "prompt_tokens",
        "counter",
        "Context tokens of answered requests",
        of("pd_prefill_prompt_tokens_total"),
    ),
    Row(
        "prompt_tokens_cached",
        "counter",
        "Those that the prefix cache gave",
        of("pd_prefill_cached_tokens_total"),
    ),
    Row(
        "prompt_tokens_by_source",
        "counter",
        _SOURCES,
        by(
            "source",
            {
                "local_compute": lambda read: (
                    read("pd_prefill_prompt_tokens_total") - read("pd_prefill_cached_tokens_total")
                ),
                "local_cache_hit": lambda read: read("pd_prefill_cached_tokens_total"),
            },
        ),
    ),
    Row("prefix_cache_queries", "counter", _QUERIES, of("pd_prefill_prompt_tokens_total")),
    Row("prefix_cache_hits", "counter", _HITS, of("pd_prefill_cached_tokens_total")),
    Row(
        "generation_tokens",
        "counter",
        _GENERATED,
        plain(lambda read: read("pd_prefill_requests_total", outcome="first_token")),
    ),
    HistogramRow(
        "request_queue_time_seconds",
        "From arrival to the first chunk",
        "pd_prefill_queue_seconds",
        REQUEST_BUCKETS_S,
    ),
    HistogramRow(
        "request_prefill_time_seconds",
        "In prefill steps",
        "pd_prefill_compute_seconds",
        REQUEST_BUCKETS_S,
    ),
    HistogramRow("iteration_tokens_total", _STEP, "pd_prefill_step_tokens", STEP_BUCKETS),
)

_SHORT_OF_ROOM = ("claimed", "waiting", "offloading", "preempted")
_IN_PREFILL = ("reserved", "waiting_for_kv")


def _decode_requests(*states: str) -> Callable[[Readings], float]:
    return lambda read: sum(read("pd_decode_num_requests", status=status) for status in states)


_POSITIONS = range(1, MAX_DRAFTS + 1)
_ACCEPTED = "pd_decode_accepted_tokens_total"


def _accepted_at(position: int) -> Callable[[Readings], float]:
    return lambda read: read(_ACCEPTED, position=str(position))


SPECULATION = (
    Row(
        "spec_decode_num_drafts",
        "counter",
        "Requests of steps that had drafts verified",
        of("pd_decode_verifications_total"),
    ),
    Row(
        "spec_decode_num_draft_tokens",
        "counter",
        "Drafts that were verified",
        of("pd_decode_draft_tokens_total"),
    ),
    Row("spec_decode_num_accepted_tokens", "counter", "Those that were right", of(_ACCEPTED)),
    Row(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Those that were right, by position from 0",
        by("position", {str(place - 1): _accepted_at(place) for place in _POSITIONS}),
    ),
)

DECODE = (
    Row(
        "num_requests_waiting",
        "gauge",
        _WAITING,
        plain(_decode_requests(*_SHORT_OF_ROOM, *_IN_PREFILL)),
    ),
    Row("num_requests_running", "gauge", _RUNNING, plain(_decode_requests("running"))),
    Row(
        "num_requests_waiting_by_reason",
        "gauge",
        _REASONS,
        by(
            "reason",
            {
                "capacity": _decode_requests(*_SHORT_OF_ROOM),
                "deferred": _decode_requests(*_IN_PREFILL),
            },
        ),
    ),
    Row(
        "kv_cache_usage_perc",
        "gauge",
        _USAGE,
        _usage("pd_decode_free_blocks", "pd_decode_total_blocks"),
    ),
    Row("cache_config_info", "gauge", _CONFIG, _cache_config("pd_decode_total_blocks")),
    Row(
        "prompt_tokens_by_source",
        "counter",
        _SOURCES,
        by(
            "source",
            {
                "external_kv_transfer": lambda read: (
                    read("pd_decode_prompt_tokens_total")
                    - read("pd_decode_cached_prompt_tokens_total")
                ),
                "local_cache_hit": lambda read: read("pd_decode_cached_prompt_tokens_total"),
            },
        ),
    ),
    Row("prefix_cache_queries", "counter", _QUERIES, of("pd_decode_prompt_tokens_total")),
    Row("prefix_cache_hits", "counter", _HITS, of("pd_decode_cached_prompt_tokens_total")),
    Row("generation_tokens", "counter", _GENERATED, of("pd_decode_generated_tokens_total")),
    *SPECULATION,
    Row(
        "num_preemptions",
        "counter",
        "Requests whose KV went to host memory",
        of("pd_decode_preemptions_total"),
    ),
    HistogramRow(
        "request_decode_time_seconds",
        "From the first decode step to the last token",
        "pd_decode_request_seconds",
        REQUEST_BUCKETS_S,
    ),
    HistogramRow("iteration_tokens_total", _STEP, "pd_decode_batch_size", STEP_BUCKETS),
)

ROUTER = (
    Row(
        "request_success",
        "counter",
        "Choices that ended by themselves",
        by(
            "finished_reason",
            {
                # As vLLM's engine counts: what calls a tool stops like any other answer.
                "stop": lambda read: (
                    read("pd_router_choices_finished_total", reason="stop")
                    + read("pd_router_choices_finished_total", reason="tool_calls")
                ),
                "length": lambda read: read("pd_router_choices_finished_total", reason="length"),
            },
        ),
    ),
    HistogramRow(
        "time_to_first_token_seconds",
        "Arrival to first token",
        "pd_ttft_seconds",
        TTFT_BUCKETS_S,
    ),
    HistogramRow(
        "inter_token_latency_seconds",
        "Between deliveries of tokens",
        "pd_itl_seconds",
        ITL_BUCKETS_S,
    ),
    HistogramRow(
        "request_time_per_output_token_seconds",
        "Of a choice, after its first token",
        "pd_tpot_seconds",
        ITL_BUCKETS_S,
    ),
    HistogramRow(
        "e2e_request_latency_seconds",
        "Arrival to last token",
        "pd_e2e_seconds",
        REQUEST_BUCKETS_S,
    ),
    HistogramRow(
        "request_inference_time_seconds",
        "From the first chunk of prefill to the last token",
        "pd_inference_seconds",
        REQUEST_BUCKETS_S,
    ),
    HistogramRow(
        "request_prompt_tokens", "Tokens of a prompt", "pd_request_prompt_tokens", LENGTH_BUCKETS
    ),
    HistogramRow(
        "request_generation_tokens",
        "Tokens of a choice",
        "pd_request_output_tokens",
        LENGTH_BUCKETS,
    ),
    HistogramRow(
        "request_params_max_tokens",
        "Most tokens that a choice may have",
        "pd_request_max_tokens",
        LENGTH_BUCKETS,
    ),
)

ROWS: Mapping[str, Sequence[Row | HistogramRow]] = {
    "prefill": PREFILL,
    "decode": DECODE,
    "router": ROUTER,
}
"""By role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmNames:
    """What one process says under vLLM's names.

    Attributes:
        role: "prefill", "decode" or "router".
        model: the model's name for clients.
        rank: of a worker's process within its instance.
        further_models: of a router that serves several.
    """

    role: str
    model: str
    rank: int = 0
    further_models: Sequence[str] = ()

    def families(self, ours: Iterable[Metric]) -> list[Metric]:
        """From all that the process exports under our names."""
        ours = list(ours)
        families = self._of_model(self.model, ours)
        for model in self.further_models:
            for family, more in zip(families, self._of_model(model, ours), strict=True):
                family.samples += more.samples
        return families

    def _of_model(self, model: str, ours: Iterable[Metric]) -> list[Metric]:
        read = Readings(ours, model=model)
        labels = {"model_name": model, "engine": str(self.rank), "role": self.role}
        return [row.family(PREFIX, read, labels) for row in ROWS[self.role]]
