"""What is added up first ends in the same metrics as what is observed one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.distribution import Distribution
from router.metrics.shared import SharedMetrics
from router.metrics.tally import CountTally, DeliveryTally, ValueTally

BUCKETS = (0.25, 0.5, 1.0)
DELIVERIES = st.lists(
    st.tuples(
        st.integers(1, 5),
        st.none() | st.sampled_from([0.0, *BUCKETS, 2.0]) | st.floats(0.0, 4.0),
    )
)
NAMED = ("itl", "Between", ["model"])
COUNT = """
from prometheus_client import CollectorRegistry
from router.distribution import Distribution
registry = CollectorRegistry()
times = Distribution("itl", "Between", ["model"], buckets=(0.25, 0.5, 1.0), registry=registry)
times.labels("m").add([1, 0, 2, 1], 5.5)
"""


class Plain:
    """One by one."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.tokens = Counter("tokens", "Tokens", registry=self.registry)
        intervals = Histogram(*NAMED, buckets=BUCKETS, registry=self.registry)
        self.intervals = intervals.labels("m")


class AddedUp:
    """Many at once."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.tokens = Counter("tokens", "Tokens", registry=self.registry)
        intervals = Distribution(*NAMED, buckets=BUCKETS, registry=self.registry)
        self.intervals = intervals.labels("m")


def told(registry: CollectorRegistry) -> dict[tuple[str, str, str], float]:
    return {
        (sample.name, *(sample.labels.get(label, "") for label in ("model", "le"))): round(
            sample.value, 9
        )
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(DELIVERIES, st.sets(st.integers(0, 20)))
def test_added_up_is_the_same_as_one_by_one(
    deliveries: list[tuple[int, float | None]], settled_after: set[int]
) -> None:
    plain, added_up = Plain(), AddedUp()
    tally = DeliveryTally(added_up.tokens, added_up.intervals)
    for number, (num_tokens, interval_s) in enumerate(deliveries):
        plain.tokens.inc(num_tokens)
        if interval_s is not None:
            plain.intervals.observe(interval_s)
        tally.add(num_tokens, interval_s)
        if number in settled_after:
            tally.settle()
    tally.settle()
    assert told(added_up.registry) == told(plain.registry)


VALUES = st.lists(st.sampled_from([0.0, *BUCKETS, 2.0]) | st.floats(0.0, 4.0))


@given(VALUES, st.sets(st.integers(0, 20)))
def test_values_added_up_are_the_same_as_one_by_one(
    values: list[float], settled_after: set[int]
) -> None:
    plain, added_up = Plain(), AddedUp()
    seconds, tokens = ValueTally(added_up.intervals), CountTally(added_up.tokens)
    for number, value in enumerate(values):
        plain.intervals.observe(value)
        plain.tokens.inc(number)
        seconds.observe(value)
        tokens.inc(number)
        if number in settled_after:
            seconds.settle()
            tokens.settle()
    seconds.settle()
    tokens.settle()
    assert told(added_up.registry) == told(plain.registry)


def test_a_distribution_reads_as_a_histogram_does() -> None:
    plain, added_up = Plain(), AddedUp()
    for value in (0.2, 0.5, 3.0):
        plain.intervals.observe(value)
    added_up.intervals.add([1, 1, 0, 1], 3.7)
    text, wanted = (
        [line for line in generate_latest(each.registry).decode().split("\n") if "itl" in line]
        for each in (added_up, plain)
    )
    assert text == [line for line in wanted if "created" not in line]


def test_distributions_of_processes_add_up(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", COUNT], env=environment, check=True, timeout=120)
    registry = CollectorRegistry()
    registry.register(SharedMetrics(str(tmp_path)))
    assert told(registry) == {
        **{("itl_bucket", "m", le): value for le, value in (("0.25", 2), ("0.5", 2), ("1.0", 6))},
        ("itl_bucket", "m", "+Inf"): 8,
        ("itl_count", "m", ""): 8,
        ("itl_sum", "m", ""): 11,
    }


def test_a_gauge_goes_down_again() -> None:
    registry = CollectorRegistry()
    tally = CountTally(Gauge("running", "Running", registry=registry))
    tally.inc()
    tally.settle()
    tally.inc()
    tally.inc(-1)
    tally.inc(-1)
    tally.settle()
    assert registry.get_sample_value("running") == 0.0
