"""What a router exports of slow ranks: how long ranks are waited for, and how many are slow."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Gauge

from runtime.stragglers.rank_picture import RankPicture
from runtime.stragglers.slow_ranks import SlowKind


class RankMetrics:
    """Of all instances whose ranks tell of their waits."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Export nothing yet: which instances there will be is not known."""
        self._waits = Gauge(
            "pd_rank_wait_ratio",
            "Share of a step that the other ranks wait for this one, in the median",
            ["worker", "rank"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._slow = Gauge(
            "pd_ranks_slow",
            "Ranks, or links between them, that slow an instance down, by kind",
            ["worker", "kind"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._known: dict[str, int] = {}
        """Ranks of the instances that were seen."""

    def set_pictures(self, pictures: Sequence[RankPicture]) -> None:
        """Of all instances; those that are gone have nobody who is slow."""
        now = {picture.instance: picture for picture in pictures}
        for instance, num_ranks in self._known.items():
            if instance not in now:
                self._set(instance, [0.0] * num_ranks, {})
        for instance, picture in now.items():
            waits = [picture.waited_for(rank) for rank in range(picture.num_ranks)]
            counts: dict[SlowKind, int] = {}
            for finding in picture.findings:
                counts[finding.kind] = counts.get(finding.kind, 0) + 1
            self._set(instance, waits, counts)
            self._known[instance] = picture.num_ranks

    def _set(self, instance: str, waits: Sequence[float], counts: dict[SlowKind, int]) -> None:
        for rank, share in enumerate(waits):
            self._waits.labels(instance, str(rank)).set(share)
        for kind in SlowKind:
            self._slow.labels(instance, kind.value).set(counts.get(kind, 0))
