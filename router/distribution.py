"""A histogram that takes many values at once: how many of each bucket, and their sum.

prometheus_client's own takes values one by one, each with two locks. The numbers are kept in its
values, so several processes of one port still add up in files (`router.metrics.shared`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Metric, values
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Series:
    """The values of one set of labels."""

    def __init__(
        self, name: str, documentation: str, labels: dict[str, str], bounds: Sequence[float]
    ):
        """``bounds`` rise; the last of them is infinity."""
        self.bounds = bounds

        def value(suffix: str, **more: str) -> Any:
            told = {**labels, **more}
            return values.ValueClass(
                "histogram", name, name + suffix, (*told,), (*told.values(),), documentation
            )

        self._sum = value("_sum")
        self._names = [_text(bound) for bound in bounds]
        self._buckets = [value("_bucket", le=name) for name in self._names]

    def add(self, counts: Sequence[int], total: float) -> None:
        """So many values of each bucket, which are ``total`` together."""
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Tell what there is so far; buckets hold those below them, too."""
        counts = itertools.accumulate(bucket.get() for bucket in self._buckets)
        family.add_metric(labels, list(zip(self._names, counts, strict=True)), self._sum.get())


def _text(bound: float) -> str:
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text


class Distribution(Collector):
    """All series of one name."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        """``buckets`` are the upper bounds, infinity left out."""
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._bounds = (*buckets, math.inf)
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def labels(self, *labels: str) -> Series:
        """The series of these values of the labels, which is exported from now on."""
        series = self._series.get(labels)
        if series is None:
            named = dict(zip(self._labels, labels, strict=True))
            series = Series(self._name, self._documentation, named, self._bounds)
            self._series[labels] = series
        return series

    def collect(self) -> Iterable[Metric]:
        """For a registry."""
        family = self._family()
        for labels, series in self._series.items():
            series.add_to(family, labels)
        return [family]

    def describe(self) -> Iterable[Metric]:
        """For a registry, which does not take a name twice."""
        return [self._family()]

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
