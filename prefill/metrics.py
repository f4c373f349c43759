"""What a prefill worker counts. Names begin with `pd_prefill_`; times are seconds.

Updated on the event loop, but for the stalls, which the engine loop measures; the gauges read the
engine loop's last snapshot at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from prefill.messages import FirstTokenSampled, LoopLoad, PartClosed
from prefill.transfer_metrics import TransferMetrics
from runtime.errors import ErrorCode, TandemError
from runtime.metrics.core import (
    LATENCY_BUCKETS_S,
    REQUEST_BUCKETS_S,
    SHORT_BUCKETS_S,
    STEP_BUCKETS,
    gauge_of,
    start_at_zero,
)
from runtime.pb import decode_pb2

_PART_OUTCOMES = ("sent", "not_needed", "abandoned", "failed")


class PrefillMetrics:
    """Counters and histograms of one worker, on the registry that it is given."""

    num_tokens = 0
    """Of all steps so far, for the router."""
    num_steps = 0
    busy_s = 0.0

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(
            name: str, documentation: str, buckets: Sequence[float] = LATENCY_BUCKETS_S
        ) -> Histogram:
            return Histogram(name, documentation, buckets=buckets, registry=registry)

        self._registry = registry
        self._requests = Counter(
            "pd_prefill_requests_total",
            "Requests by how they ended: first_token, or the name of an error code",
            ["outcome"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "pd_prefill_prompt_tokens_total",
            "Context tokens (prompt, and output of before a move) of answered requests",
            registry=registry,
        )
        self._cached_tokens = Counter(
            "pd_prefill_cached_tokens_total", "Those that the prefix cache gave", registry=registry
        )
        self._sent_bytes = Counter(
            "pd_prefill_kv_sent_bytes_total", "Bytes of KV that all ranks sent", registry=registry
        )
        self._parts = Counter(
            "pd_prefill_ticket_parts_total",
            "Parts of tickets by how they ended",
            ["outcome"],
            registry=registry,
        )
        self._queue = histogram(
            "pd_prefill_queue_seconds", "From arrival to the first chunk", REQUEST_BUCKETS_S
        )
        self._compute = histogram(
            "pd_prefill_compute_seconds", "In steps, summed over chunks", REQUEST_BUCKETS_S
        )
        self._transfer = histogram(
            "pd_prefill_kv_transfer_seconds", "First post to last completion of a part"
        )
        self._exposed = histogram(
            "pd_prefill_kv_exposed_seconds", "From the first token to the end of a sent part"
        )
        self._transfers = TransferMetrics(registry)
        self._add_steps(registry)
        codes = (code.name.lower() for code in ErrorCode)
        start_at_zero(self._requests, ("first_token", *codes))
        start_at_zero(self._parts, _PART_OUTCOMES)

    def _add_steps(self, registry: CollectorRegistry) -> None:
        self._stall = Histogram(
            "pd_prefill_kv_stall_seconds",
            "Of a step of the engine loop, in calls into the KV sender",
            buckets=SHORT_BUCKETS_S,
            registry=registry,
        )
        self._step = Histogram(
            "pd_prefill_step_seconds", "One step", buckets=LATENCY_BUCKETS_S, registry=registry
        )
        self._step_tokens = Histogram(
            "pd_prefill_step_tokens",
            "Prompt tokens of a step",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self._gap = Histogram(
            "pd_prefill_step_gap_seconds",
            "GPU idle between the end of a step and the start of the next",
            buckets=SHORT_BUCKETS_S,
            registry=registry,
        )
        self._longest_stall_s = 0.0
        gauge_of(
            registry,
            "pd_prefill_kv_stall_max_seconds",
            "The longest of these",
            lambda: self._longest_stall_s,
        )

    def watch(self, load: Callable[[], LoopLoad], num_dropped: Callable[[], int]) -> None:
        """Export the engine loop's queues and pool, and the closures that decode never got."""
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "num_requests_waiting": ("Queued for blocks", lambda: load().num_waiting),
            "num_requests_claiming": ("Waiting for room in decode", lambda: load().num_claiming),
            "num_requests_running": ("Being computed", lambda: load().num_running),
            "num_requests_sending": ("Computed, still sent", lambda: load().num_sending),
            "num_tokens_waiting": ("Tokens to compute", lambda: load().num_tokens_waiting),
            "num_free_blocks": ("KV blocks to allocate", lambda: load().num_free_blocks),
            "num_total_blocks": ("Usable KV blocks", lambda: load().num_total_blocks),
            "num_dropped_closures": ("Closures of tickets that were given up", num_dropped),
        }
        for name, (documentation, read) in gauges.items():
            gauge_of(self._registry, f"pd_prefill_{name}", documentation, read)

    def first_token(self, event: FirstTokenSampled, num_context_tokens: int) -> None:
        """A request was answered."""
        self._requests.labels("first_token").inc()
        self._prompt_tokens.inc(num_context_tokens)
        self._cached_tokens.inc(event.num_cached_tokens)
        self._queue.observe(event.queue_s)
        self._compute.observe(event.compute_s)

    def request_ended(self, error: TandemError) -> None:
        """A request ended without a first token."""
        self._requests.labels(error.code.name.lower()).inc()

    def step_stalled(self, seconds: float) -> None:
        """A step spent so long in calls into the sender. Called on the engine loop's thread."""
        self._stall.observe(seconds)
        self._longest_stall_s = max(self._longest_stall_s, seconds)

    def stepped(self, num_tokens: int, seconds: float) -> None:
        """A step was run. Called on the engine loop's thread, as the next."""
        self._step.observe(seconds)
        self._step_tokens.observe(num_tokens)
        self.num_tokens += num_tokens
        self.num_steps += 1
        self.busy_s += seconds

    def step_waited(self, seconds: float) -> None:
        """The device idled so long between two steps."""
        self._gap.observe(seconds)

    def part_closed(self, event: PartClosed, outcome: decode_pb2.TicketOutcome, peer: str) -> None:
        """A rank is done with a ticket of the decode rank `peer`."""
        self._transfers.part_closed(peer, event)
        name = decode_pb2.TicketOutcome.Name(outcome).removeprefix("TICKET_OUTCOME_").lower()
        self._parts.labels(name).inc()
        self._sent_bytes.inc(event.closure.num_bytes)
        if outcome == decode_pb2.TICKET_OUTCOME_SENT:
            self._transfer.observe(event.closure.transfer_s)
            self._exposed.observe(event.kv_exposed_s)
