"""Metrics with a label for the peer, bounded: a peer that is gone takes its series along.

Workers come and go for as long as a process lives, so a peer that was not heard of for a while is
forgotten, and so is the one that was not heard of for longest when there are too many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from prometheus_client import Counter, Gauge, Histogram

MetricT = TypeVar("MetricT", Counter, Gauge, Histogram)
_Series = tuple[Counter | Gauge | Histogram, tuple[str, ...]]


class PeerSeries:
    """Which series each peer has. Used by one thread; scrapes may come from any."""

    def __init__(
        self, clock: Callable[[], float], *, idle_s: float = 900.0, max_peers: int = 256
    ) -> None:
        """Know nobody.

        Args:
            clock: monotonic seconds.
            idle_s: a peer is forgotten after so many seconds of silence.
            max_peers: most peers that are remembered.
        """
        self._clock = clock
        self._idle_s = idle_s
        self._max_peers = max_peers
        self._series: OrderedDict[str, set[_Series]] = OrderedDict()  # silent for longest first
        self._heard_at: dict[str, float] = {}

    @property
    def num_peers(self) -> int:
        """Peers that have series."""
        return len(self._series)

    def of(self, metric: MetricT, peer: str, *others: str) -> MetricT:
        """The child of ``metric`` for ``peer``, whose label comes first, and its other labels."""
        labels = (peer, *others)
        self._series.setdefault(peer, set()).add((metric, labels))
        self._series.move_to_end(peer)
        self._heard_at[peer] = self._clock()
        self._forget_old()
        return metric.labels(*labels)

    def _forget_old(self) -> None:
        now = self._clock()
        while True:
            peer = next(iter(self._series))
            is_idle = now - self._heard_at[peer] >= self._idle_s
            if not is_idle and len(self._series) <= self._max_peers:
                return
            del self._heard_at[peer]
            for metric, labels in self._series.pop(peer):
                metric.remove(*labels)
