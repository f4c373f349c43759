"""What requests and tokens count, kept here and handed to Prometheus now and then.

A counter takes a lock for every number and a histogram two, more than a token's text costs; the
sums over half a second are the same. One event loop owns a tally.
"""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import Counter, Gauge

from router.distribution import Series


class DeliveryTally:
    """Output tokens, and the time between deliveries of them."""

    def __init__(self, tokens: Counter, intervals: Series) -> None:
        """``settle`` adds to these two, which have no labels left to give."""
        self._tokens = tokens
        self._intervals = intervals
        self._bounds = intervals.bounds
        self._num_tokens = 0
        self._sum_s = 0.0
        self._counts = [0] * len(self._bounds)
        """Intervals by bucket."""

    def add(self, num_tokens: int, interval_s: float | None) -> None:
        """One delivery to a client; ``interval_s`` since the one before, None of the first."""
        self._num_tokens += num_tokens
        if interval_s is not None:
            self._sum_s += interval_s
            self._counts[bisect_left(self._bounds, interval_s)] += 1

    def settle(self) -> None:
        """Hand over what was added; call it before anyone reads, and now and then."""
        if not self._num_tokens:
            return
        self._tokens.inc(self._num_tokens)
        self._intervals.add(self._counts, self._sum_s)
        self._num_tokens, self._sum_s = 0, 0.0
        self._counts = [0] * len(self._bounds)


class CountTally:
    """For a counter, or for a gauge of what is there now."""

    def __init__(self, metric: Counter | Gauge) -> None:
        """``settle`` adds to ``metric``, which has no labels left to give."""
        self._metric = metric
        self._sum = 0.0

    def inc(self, number: float = 1.0) -> None:
        """So many more; of a gauge also fewer."""
        self._sum += number

    def settle(self) -> None:
        """Hand over what was added."""
        if self._sum:
            self._metric.inc(self._sum)
            self._sum = 0.0


class ValueTally:
    """For a distribution."""

    def __init__(self, series: Series) -> None:
        """``settle`` adds to ``series``."""
        self._series = series
        self._values: list[float] = []

    def observe(self, value: float) -> None:
        """One more value."""
        self._values.append(value)

    def settle(self) -> None:
        """Hand over what was observed."""
        values, self._values = self._values, []
        if not values:
            return
        bounds = self._series.bounds
        counts = [0] * len(bounds)
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self._series.add(counts, sum(values))
