"""What the router counts for each tier of service; nothing where there are no tiers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

from runtime.metrics.core import ITL_BUCKETS_S, TTFT_BUCKETS_S, start_at_zero
from runtime.tiers import Standing

RESULTS = ("met", "missed")
TARGETS = ("ttft", "tpot")


class TierMetrics:
    """Of one router process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ttft = Histogram(
            "pd_tier_ttft_seconds",
            "Arrival to first token, of choices that ended by themselves",
            ["tier"],
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self._tpot = Histogram(
            "pd_tier_tpot_seconds",
            "Of a choice, a token after its first, in the mean",
            ["tier"],
            buckets=ITL_BUCKETS_S,
            registry=registry,
        )
        self._targets = Counter(
            "pd_tier_targets",
            "Choices that met or missed a target of their tier",
            ["tier", "target", "result"],
            registry=registry,
        )
        self._tokens = Counter(
            "pd_tier_output_tokens",
            "Output tokens of choices that met all targets of their tier, or missed one",
            ["tier", "result"],
            registry=registry,
        )
        self._refused = Counter(
            "pd_tier_refused", "Requests that were answered 429", ["tier"], registry=registry
        )
        self._waiting = Gauge(
            "pd_tier_requests_waiting",
            "Requests that wait for a place in flight",
            ["tier"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._running = Gauge(
            "pd_tier_requests_running",
            "Choices in the workers' hands",
            ["tier"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._names: tuple[str, ...] = ()

    def expect(self, names: Iterable[str]) -> None:
        """Export these tiers before any request of theirs has come."""
        self._names = tuple(names)
        start_at_zero(self._targets, self._names, TARGETS, RESULTS)
        start_at_zero(self._tokens, self._names, RESULTS)
        start_at_zero(self._refused, self._names)
        for name in self._names:
            self._ttft.labels(name)
            self._tpot.labels(name)
        self.set_load({}, {})

    def set_load(self, waiting: Mapping[str, int], running: Mapping[str, int]) -> None:
        """Queued and concurrent requests, by tier; who is not named has none."""
        for name in self._names:
            self._waiting.labels(name).set(waiting.get(name, 0))
            self._running.labels(name).set(running.get(name, 0))

    def loads(self, families: Iterable[Metric]) -> list[dict[str, object]]:
        """A row for each tier, first in order first: what waits and runs, and targets met so far.

        Args:
            families: the router's metrics, of all its HTTP processes.
        """
        if not self._names:
            return []  # nothing is collected for it either
        counts = {
            (
                sample.name,
                *(sample.labels.get(label, "") for label in ("tier", "target", "result")),
            ): (int(sample.value))
            for family in families
            if family.name.startswith("pd_tier_")
            for sample in family.samples
        }
        return [
            {
                "name": name,
                "num_requests_waiting": counts.get(("pd_tier_requests_waiting", name, "", ""), 0),
                "num_requests_running": counts.get(("pd_tier_requests_running", name, "", ""), 0),
                "targets": {
                    target: {
                        result: counts.get(("pd_tier_targets_total", name, target, result), 0)
                        for result in RESULTS
                    }
                    for target in TARGETS
                },
            }
            for name in self._names
        ]

    def count_refused(self, standing: Standing) -> None:
        """One answer 429 of the router itself."""
        if standing.tier:
            self._refused.labels(standing.tier).inc()

    def finished(self, standing: Standing, split: Mapping[str, float], num_tokens: int) -> None:
        """One choice that ended by itself.

        Args:
            standing: as it was when the request came.
            split: its seconds by stage, as ``RequestTimings.split`` has them.
            num_tokens: of its output.
        """
        tier = standing.tier
        if not tier:
            return
        ttft_s = split["ttft_s"]
        self._ttft.labels(tier).observe(ttft_s)
        results = [("ttft", ttft_s, standing.ttft_s)]
        if num_tokens > 1:
            tpot_s = (split["total_s"] - ttft_s) / (num_tokens - 1)
            self._tpot.labels(tier).observe(tpot_s)
            results.append(("tpot", tpot_s, standing.tpot_s))
        is_good = True
        for name, value, target in results:
            if target:
                is_met = value <= target
                is_good &= is_met
                self._targets.labels(tier, name, RESULTS[not is_met]).inc()
        self._tokens.labels(tier, RESULTS[not is_good]).inc(num_tokens)
