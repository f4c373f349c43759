"""What each rank's part of a transfer cost, per decode rank. Names begin with `pd_kv_transfer_`.

The decode side counts what it sees of the same transfers under the same prefix. Updated on the
event loop only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram

from prefill.messages import PartClosed
from prefill.rank_plan import ClosureOutcome
from runtime.metrics.core import BYTES_BUCKETS, LATENCY_BUCKETS_S, SHORT_BUCKETS_S
from runtime.metrics.peer_series import PeerSeries

_DESCRIPTOR_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


class TransferMetrics:
    """Histograms with the label `peer`, "instance/rank" of the decode rank."""

    def __init__(
        self, registry: CollectorRegistry, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        def histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
            full_name = f"pd_kv_transfer_{name}"
            return Histogram(full_name, documentation, ["peer"], buckets=buckets, registry=registry)

        self._peers = PeerSeries(clock)
        self._bytes = histogram("bytes", "Bytes of a sent part", BYTES_BUCKETS)
        self._descriptors = histogram("descriptors", "Writes of a sent part", _DESCRIPTOR_BUCKETS)
        self._post = histogram("post_seconds", "In calls of the library's post", SHORT_BUCKETS_S)
        self._wire = histogram(
            "wire_seconds", "With at least one post in flight", LATENCY_BUCKETS_S
        )
        self._exposed = histogram(
            "exposed_seconds", "From the first token to the end of a sent part", LATENCY_BUCKETS_S
        )
        self._failures = Counter(
            "pd_kv_transfer_failures",
            "Parts that failed, by error code",
            ["peer", "cause"],
            registry=registry,
        )

    def part_closed(self, peer: str, event: PartClosed) -> None:
        """A rank is done with a ticket of `peer`."""
        closure = event.closure
        if closure.outcome is ClosureOutcome.FAILED:
            code = closure.error_code
            cause = code.name.lower() if code else "unknown"
            self._peers.of(self._failures, peer, cause).inc()
        elif closure.outcome is ClosureOutcome.SENT:
            self._peers.of(self._bytes, peer).observe(closure.num_bytes)
            self._peers.of(self._descriptors, peer).observe(closure.num_descriptors)
            self._peers.of(self._post, peer).observe(closure.post_s)
            self._peers.of(self._wire, peer).observe(closure.wire_s)
            self._peers.of(self._exposed, peer).observe(event.kv_exposed_s)
