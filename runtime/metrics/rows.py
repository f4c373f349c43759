"""Metrics under other names: rows of a table that read, at a scrape, what is exported anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import Metric
from prometheus_client.utils import floatToGoString

Samples = Iterable[tuple[Mapping[str, str], float]]


class Readings:
    """The samples of one scrape, by name."""

    def __init__(self, families: Iterable[Metric], *, model: str = "") -> None:
        """Of one ``model``, where samples have that label; "": of all."""
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in families:
            suffix = "_total" if family.type == "counter" else ""
            self._samples.setdefault(family.name + suffix, [])
            for sample in family.samples:
                if model and sample.labels.get("model", model) != model:
                    continue
                found = self._samples.setdefault(sample.name, [])
                found.append((sample.labels, sample.value))

    def __call__(self, name: str, **labels: str) -> float:
        """The sum over the samples of a metric with these labels; KeyError for an unknown one."""
        return sum(
            value
            for of_sample, value in self._samples[name]
            if all(of_sample.get(key) == wanted for key, wanted in labels.items())
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A gauge or a counter.

    Attributes:
        name: without prefix, and without the `_total` of a counter.
        kind: of metric.
        documentation: for its HELP.
        samples: labels beside the common ones, and values.
    """

    name: str
    kind: Literal["gauge", "counter"]
    documentation: str
    samples: Callable[[Readings], Samples]

    def family(self, prefix: str, read: Readings, labels: Mapping[str, str]) -> Metric:
        """What a scrape gets."""
        family = Metric(prefix + self.name, self.documentation, self.kind)
        suffix = "_total" if self.kind == "counter" else ""
        for extra, value in self.samples(read):
            family.add_sample(family.name + suffix, {**labels, **extra}, value)
        return family


@dataclass(frozen=True, slots=True)
class HistogramRow:
    """Some of the buckets of a histogram.

    Attributes:
        name: without prefix.
        documentation: for its HELP.
        source: its name.
        buckets: upper bounds, which it has among others.
    """

    name: str
    documentation: str
    source: str
    buckets: Sequence[float]

    def family(self, prefix: str, read: Readings, labels: Mapping[str, str]) -> Metric:
        """What a scrape gets."""
        family = Metric(prefix + self.name, self.documentation, "histogram")
        name = family.name
        count = read(f"{self.source}_count")
        for bound in self.buckets:
            text = floatToGoString(bound)  # type: ignore[no-untyped-call]
            value = read(f"{self.source}_bucket", le=text)
            family.add_sample(f"{name}_bucket", {**labels, "le": text}, value)
        family.add_sample(f"{name}_bucket", {**labels, "le": "+Inf"}, count)
        family.add_sample(f"{name}_count", dict(labels), count)
        family.add_sample(f"{name}_sum", dict(labels), read(f"{self.source}_sum"))
        return family


def plain(read_value: Callable[[Readings], float]) -> Callable[[Readings], Samples]:
    """One sample, without labels of its own."""
    return lambda read: [({}, read_value(read))]


def of(name: str) -> Callable[[Readings], Samples]:
    """The one value of a metric of ours, or the sum of its values."""
    return plain(lambda read: read(name))


def by(
    label: str, values: Mapping[str, Callable[[Readings], float]]
) -> Callable[[Readings], Samples]:
    """A sample for each value of a label."""
    return lambda read: [({label: key}, value(read)) for key, value in values.items()]
