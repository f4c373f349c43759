"""What is added up first ends in the same metrics as what is observed one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.tally import CountTally, DeliveryTally, ValueTally

BUCKETS = (0.25, 0.5, 1.0)
DELIVERIES = st.lists(
    st.tuples(
        st.integers(1, 5),
        st.none() | st.sampled_from([0.0, *BUCKETS, 2.0]) | st.floats(0.0, 4.0),
    )
)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.tokens = Counter("tokens", "Tokens", registry=self.registry)
        self.intervals = Histogram("itl", "Between", buckets=BUCKETS, registry=self.registry)

    def values(self) -> dict[tuple[str, str], float]:
        return {
            (sample.name, sample.labels.get("le", "")): round(sample.value, 9)
            for family in self.registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }


@given(DELIVERIES, st.sets(st.integers(0, 20)))
def test_added_up_is_the_same_as_one_by_one(
    deliveries: list[tuple[int, float | None]], settled_after: set[int]
) -> None:
    plain, added_up = Metrics(), Metrics()
    tally = DeliveryTally(added_up.tokens, added_up.intervals)
    for number, (num_tokens, interval_s) in enumerate(deliveries):
        plain.tokens.inc(num_tokens)
        if interval_s is not None:
            plain.intervals.observe(interval_s)
        tally.add(num_tokens, interval_s)
        if number in settled_after:
            tally.settle()
    tally.settle()
    assert added_up.values() == plain.values()


VALUES = st.lists(st.sampled_from([0.0, *BUCKETS, 2.0]) | st.floats(0.0, 4.0))


@given(VALUES, st.sets(st.integers(0, 20)))
def test_values_added_up_are_the_same_as_one_by_one(
    values: list[float], settled_after: set[int]
) -> None:
    plain, added_up = Metrics(), Metrics()
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
    assert added_up.values() == plain.values()


def test_a_gauge_goes_down_again() -> None:
    gauge = Gauge("running", "Running", registry=None)
    tally = CountTally(gauge)
    tally.inc()
    tally.settle()
    tally.inc()
    tally.inc(-1)
    tally.inc(-1)
    tally.settle()
    assert gauge._value.get() == 0.0
