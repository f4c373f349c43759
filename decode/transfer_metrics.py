"""What the arriving side sees of transfers, per prefill worker. Names begin with `pd_kv_transfer_`.

The engine loop writes; a scrape only reads. The prefill side counts descriptors and the times of
the same transfers under the same prefix.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from decode.closings import PartEnd
from runtime.metrics.core import LATENCY_BUCKETS_S
from runtime.metrics.peer_series import PeerSeries
from runtime.pb import decode_pb2

MAX_TOLD_PEERS = 64
"""Writers of which the router is told at each renewal."""


class TransferMetrics:
    """The label `peer` is "instance/rank" of a part's writer, or the writing "instance"."""

    def __init__(
        self, registry: CollectorRegistry, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._peers = PeerSeries(clock)
        self._arrival = Histogram(
            "pd_kv_transfer_arrival_seconds",
            "From ticket to complete KV",
            ["peer"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._exposed = Histogram(
            "pd_kv_transfer_exposed_seconds",
            "From the first token to the end of a sent part, as its writer says",
            ["peer"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._received = Counter(
            "pd_kv_transfer_received_bytes",
            "Bytes of closed parts, as their writers say",
            ["peer"],
            registry=registry,
        )
        self._failures = Counter(
            "pd_kv_transfer_failures",
            "Parts that failed, by error code",
            ["peer", "cause"],
            registry=registry,
        )
        self._quarantined = Gauge(
            "pd_kv_transfer_quarantined_blocks",
            "KV blocks of cancelled tickets that this writer may still reach",
            ["peer"],
            registry=registry,
        )
        self._in_quarantine: set[str] = set()
        self._totals: OrderedDict[str, tuple[int, float]] = OrderedDict()  # longest silent first

    def received(self) -> dict[str, tuple[int, float]]:
        """Bytes so far from each of the last writers, and the seconds in which these were on their
        way; called on any thread.
        """
        return dict(self._totals)

    def arrived(self, instance: str, waited_s: float) -> None:
        """All parts of a request of `instance` are here."""
        self._peers.of(self._arrival, instance).observe(waited_s)

    def part_closed(self, part: PartEnd) -> None:
        """A part is over, one way or another."""
        self._peers.of(self._received, part.peer).inc(part.num_bytes)
        num_bytes, seconds = self._totals.get(part.peer, (0, 0.0))
        seconds += part.timings.kv_wire_s
        self._totals[part.peer] = num_bytes + part.num_bytes, seconds
        self._totals.move_to_end(part.peer)
        if len(self._totals) > MAX_TOLD_PEERS:
            self._totals.popitem(last=False)
        if part.outcome == decode_pb2.TICKET_OUTCOME_SENT:
            self._peers.of(self._exposed, part.peer).observe(part.timings.kv_exposed_s)
        elif part.outcome == decode_pb2.TICKET_OUTCOME_FAILED:
            cause = part.failure.code.name.lower()
            self._peers.of(self._failures, part.peer, cause).inc()

    def set_quarantined(self, num_blocks: Mapping[str, int]) -> None:
        """Mirror the quarantine: blocks by writing instance."""
        for instance in self._in_quarantine - num_blocks.keys():
            self._peers.of(self._quarantined, instance).set(0)
        for instance, count in num_blocks.items():
            self._peers.of(self._quarantined, instance).set(count)
        self._in_quarantine = set(num_blocks)
