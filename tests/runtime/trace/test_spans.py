"""The queue of spans: bounded, counted, and in nobody's way; and who is sampled."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from runtime.config import TracingSection
from runtime.errors import ConfigError
from runtime.trace.context import MAX_STATE, TraceContext
from runtime.trace.otlp import open_spans
from runtime.trace.spans import MAX_QUEUED, Span, Spans


def span(trace: TraceContext | None = None, start: float = 1.0, end: float = 2.0) -> Span:
    return Span(name="x", trace=trace or TraceContext.begin(1.0), start=start, end=end)


def counted(registry: CollectorRegistry, outcome: str) -> float | None:
    return registry.get_sample_value("pd_trace_spans_total", {"outcome": outcome})


def test_what_is_queued_is_sent_at_the_end_with_wall_clock_times() -> None:
    sent: list[Span] = []
    registry = CollectorRegistry()
    spans = Spans(lambda batch: sent.extend(batch) is None, registry)
    now = time.monotonic()
    spans.record(span(start=now - 1.0, end=now))
    spans.record(span(TraceContext.begin(0.0)))  # nobody records it
    spans.close()
    (one,) = sent
    assert abs(int(one.end * 1e9) + one.wall_ns - time.time_ns()) < 60e9
    assert counted(registry, "exported") == 1


def test_a_collector_that_hangs_costs_spans_and_no_time() -> None:
    registry, hangs, has_begun = CollectorRegistry(), threading.Event(), threading.Event()

    def export(batch: Sequence[Span]) -> bool:
        has_begun.set()
        return hangs.wait(60)

    spans = Spans(export, registry)
    try:
        first = [span() for _ in range(600)]  # wakes the thread, which takes a batch and hangs
        spans.record(*first)
        assert has_begun.wait(60)
        spans.record(*[span() for _ in range(2 * MAX_QUEUED)])  # returns: nothing is waited for
        dropped = counted(registry, "dropped")
        assert dropped is not None
        assert MAX_QUEUED <= dropped < 2 * MAX_QUEUED
    finally:
        hangs.set()
        spans.close()


def test_a_collector_that_is_away_is_counted_and_the_thread_goes_on() -> None:
    registry, calls = CollectorRegistry(), []

    def export(batch: Sequence[Span]) -> bool:
        calls.append(len(batch))
        if len(calls) == 1:
            raise OSError("away")
        return len(calls) > 2

    spans = Spans(export, registry)
    spans.record(*[span() for _ in range(3 * 512)])
    spans.close()
    total = sum(counted(registry, outcome) or 0 for outcome in ("exported", "failed"))
    assert total == sum(calls)
    assert counted(registry, "failed") == sum(calls[:2])


@given(*[st.floats(0.0, 100.0) for _ in range(4)])
def test_a_part_lies_within_its_whole(a: float, b: float, c: float, d: float) -> None:
    whole = span(start=min(a, b), end=max(a, b))
    part = whole.below("part", c, d)
    assert whole.start <= part.start <= part.end <= whole.end
    assert part.trace.parent_id == whole.trace.span_id
    assert part.trace.trace_id == whole.trace.trace_id


def test_a_ratio_decides_by_the_trace_s_id() -> None:
    assert all(TraceContext.begin(1.0).is_sampled for _ in range(200))
    assert not any(TraceContext.begin(0.0).is_sampled for _ in range(200))
    half = sum(TraceContext.begin(0.5).is_sampled for _ in range(2000))
    assert 800 < half < 1200  # nine standard deviations


@pytest.mark.parametrize(
    ("state", "kept"),
    [("a=1,b=2", True), (" a=1 ", True), ("x" * (MAX_STATE + 1), False), ("a=\u00e9", False)],
)
def test_a_state_is_handed_on_or_left_out(state: str, kept: bool) -> None:
    header = TraceContext.begin(1.0).header
    trace = TraceContext.parse(header, state)
    assert trace is not None
    assert trace.child().state == (state.strip() if kept else "")


def test_without_an_endpoint_there_is_nothing() -> None:
    assert open_spans(TracingSection(), CollectorRegistry(), role="router") is None


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"endpoint": "collector:4317"}, "tracing.endpoint"),
        ({"endpoint": "grpc://collector:4317"}, "tracing.endpoint"),
        ({"sample_ratio": 1.5}, "tracing.sample_ratio"),
        ({"sample_ratio": -0.1}, "tracing.sample_ratio"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        TracingSection(**fields)  # type: ignore[arg-type]


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    section = TracingSection(endpoint="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"tandem-serve\[tracing\]"):
        open_spans(section, CollectorRegistry(), role="router")
