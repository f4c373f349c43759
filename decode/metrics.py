"""What a decode rank counts. The engine loop writes; a scrape only reads.

Gauges that mirror the books of the rank are set once a step, so that a scrape never walks them.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from decode.draft_metrics import DraftMetrics
from decode.transfer_metrics import TransferMetrics
from runtime.errors import ErrorCode, TandemError
from runtime.metrics.core import (
    LATENCY_BUCKETS_S,
    REQUEST_BUCKETS_S,
    SHORT_BUCKETS_S,
    STEP_BUCKETS,
    start_at_zero,
)
from runtime.pb import common_pb2, registry_pb2
from runtime.sampling import FinishReason
from worker.lifecycle import DecodeStatus

_STEP_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class DecodeMetrics:
    """The `pd_decode_*` metrics of one process.

    `transfers` are those per prefill worker, `drafts` those of speculation.
    """

    num_tokens = 0
    """Of all steps so far, for the router."""
    num_steps = 0
    num_requests = 0
    """That ended by themselves."""
    busy_s = 0.0

    def __init__(self, registry: CollectorRegistry) -> None:
        def latency(name: str, documentation: str) -> Histogram:
            return Histogram(name, documentation, buckets=LATENCY_BUCKETS_S, registry=registry)

        self.transfers = TransferMetrics(registry)
        self.drafts = DraftMetrics(registry)
        self._requests = Gauge(
            "pd_decode_num_requests", "Live requests by state", ["status"], registry=registry
        )
        self._free = Gauge("pd_decode_free_blocks", "KV blocks without owner", registry=registry)
        self._total = Gauge("pd_decode_total_blocks", "KV blocks of the pool", registry=registry)
        self._quarantined = Gauge(
            "pd_decode_quarantined_blocks", "KV blocks in quarantine", registry=registry
        )
        self._offloaded = Gauge(
            "pd_decode_offloaded_blocks", "KV blocks in host memory", registry=registry
        )
        self._preemptions = Counter(
            "pd_decode_preemptions", "Requests whose KV went to host memory", registry=registry
        )
        self._resumes = Counter(
            "pd_decode_resumes", "Preempted requests that came back", registry=registry
        )
        self._tokens = Counter(
            "pd_decode_generated_tokens", "Tokens sampled here", registry=registry
        )
        self._cached = Counter(
            "pd_decode_cached_prompt_tokens", "Context tokens that were here", registry=registry
        )
        self._prompt = Counter(
            "pd_decode_prompt_tokens", "Context tokens of issued tickets", registry=registry
        )
        self._bytes = Counter(
            "pd_decode_kv_received_bytes", "As counted by the senders", registry=registry
        )
        self._finished = Counter(
            "pd_decode_requests_finished", "Ended requests", ["reason"], registry=registry
        )
        self._rejected = Counter(
            "pd_decode_reservations_rejected", "Refused reservations", ["code"], registry=registry
        )
        self._fences = Counter("pd_decode_fences", "Writers shut out", registry=registry)
        self._transfer = latency(
            "pd_decode_kv_wait_seconds", "From ticket to complete KV (prefill and transfer)"
        )
        self._reserve = latency("pd_decode_reserve_seconds", "From claim to ticket")
        self._admission = latency(
            "pd_decode_admission_seconds", "From complete KV to the first step"
        )
        self._add_steps(registry)
        start_at_zero(self._finished, (reason.value for reason in FinishReason))
        start_at_zero(self._rejected, (code.name.lower() for code in ErrorCode))
        start_at_zero(
            self._requests,
            (status.value for status in DecodeStatus if status is not DecodeStatus.FINISHED),
        )

    def _add_steps(self, registry: CollectorRegistry) -> None:
        self._decoding = Histogram(
            "pd_decode_request_seconds",
            "From the first step to the last token, of requests that ended by themselves",
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._step = Histogram(
            "pd_decode_step_seconds", "One step", buckets=_STEP_BUCKETS_S, registry=registry
        )
        self._gap = Histogram(
            "pd_decode_step_gap_seconds",
            "GPU idle between the end of a step and the start of the next",
            buckets=SHORT_BUCKETS_S,
            registry=registry,
        )
        self._batch = Histogram(
            "pd_decode_batch_size", "Requests of a step", buckets=STEP_BUCKETS, registry=registry
        )

    def rejected(self, error: TandemError) -> None:
        """A reservation was refused or given up; called on either thread."""
        self._rejected.labels(error.code.name.lower()).inc()

    def finished(self, reason: FinishReason) -> None:
        """A request was answered for the last time."""
        self._finished.labels(reason.value).inc()

    def kv_arrived(self, waited_s: float, num_context_tokens: int, num_cached_tokens: int) -> None:
        """The KV of a request is complete."""
        self._transfer.observe(waited_s)
        self._prompt.inc(num_context_tokens)
        self._cached.inc(num_cached_tokens)

    def kv_received(self, num_bytes: int) -> None:
        """A part closed its ticket."""
        self._bytes.inc(num_bytes)

    def started(self, timings: common_pb2.Timings) -> None:
        """A request enters its first step."""
        self._reserve.observe(timings.decode_reserve_s)
        self._admission.observe(timings.decode_admission_s)

    def decoded(self, seconds: float) -> None:
        """A request had its last token, so long after its first step began."""
        self._decoding.observe(seconds)
        self.num_requests += 1

    def scheduled(self, num_preempted: int, num_resumed: int) -> None:
        """A step was planned."""
        self._preemptions.inc(num_preempted)
        self._resumes.inc(num_resumed)

    def stepped(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """A step was run; as many of its requests as went on got a token."""
        self._step.observe(seconds)
        self._batch.observe(num_requests)
        self._tokens.inc(num_tokens)
        self.num_tokens += num_tokens
        self.num_steps += 1
        self.busy_s += seconds

    def step_waited(self, seconds: float) -> None:
        """The device idled so long between two steps."""
        self._gap.observe(seconds)

    def fenced(self) -> None:
        """A writer was shut out."""
        self._fences.inc()

    def set_offloaded(self, num_blocks: int) -> None:
        """So many blocks of preempted requests are in host memory."""
        self._offloaded.set(num_blocks)

    def set_load(self, counts: Mapping[DecodeStatus, int], load: registry_pb2.WorkerLoad) -> None:
        """Mirror the books."""
        for status, count in counts.items():
            self._requests.labels(status.value).set(count)
        self._free.set(load.num_free_blocks)
        self._total.set(load.num_total_blocks)
        self._quarantined.set(load.num_quarantined_blocks)
