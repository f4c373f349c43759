"""Rates and times of the last seconds, from the counters."""

from __future__ import annotations

import logging

import pytest

from router.metrics.core import RouterMetrics
from router.metrics.model import ModelMetrics
from router.metrics.recent import LINE_S, SAMPLE_S, LoadLines, RecentWindow, Totals, quantile


class Clock:
    """Set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def serve(metrics: RouterMetrics, count: int, ttft_s: float) -> None:
    model = ModelMetrics(metrics, "m")
    for _ in range(count):
        metrics.count_request("m", "/v1/completions", 200)
        model.prompt_tokens.inc(10)
        model.output_tokens.inc(4)
        model.ttft.observe(ttft_s)
    model.settle()


def totals_of(metrics: RouterMetrics) -> Totals:
    return Totals.of(metrics.sums().collect())


def test_rates_are_those_of_the_last_seconds() -> None:
    metrics, clock = RouterMetrics(), Clock()
    window = RecentWindow(lambda: totals_of(metrics), clock)
    serve(metrics, 1000, 9.0)
    clock.now += SAMPLE_S
    window.tick()
    serve(metrics, 20, 0.2)
    clock.now += SAMPLE_S
    window.tick()
    serve(metrics, 10, 0.2)
    clock.now += 1.0
    window.tick()
    recent = window.recent()
    assert recent.window_s == SAMPLE_S + 1.0
    assert recent.requests_per_s == 5.0
    assert recent.prompt_tokens_per_s == 50.0
    assert recent.output_tokens_per_s == 20.0
    assert recent.ttft_p50_s is not None
    assert 0.1 < recent.ttft_p50_s <= 0.25


def test_a_router_that_has_just_begun_has_rates_too() -> None:
    metrics, clock = RouterMetrics(), Clock()
    window = RecentWindow(lambda: totals_of(metrics), clock)
    assert window.recent().requests_per_s == 0.0
    serve(metrics, 3, 0.2)
    clock.now += 1.5
    assert window.recent().requests_per_s == 2.0


def test_long_silence_is_silence() -> None:
    metrics, clock = RouterMetrics(), Clock()
    window = RecentWindow(lambda: totals_of(metrics), clock)
    serve(metrics, 3, 0.2)
    for _ in range(8):
        clock.now += SAMPLE_S
        window.tick()
    recent = window.recent()
    assert recent.is_idle
    assert recent.ttft_p50_s is None
    assert recent.ttft_p99_s is None


def test_quantiles_lie_between_the_bounds_of_their_bucket() -> None:
    infinity = float("inf")
    buckets = [(0.1, 0.0), (0.2, 90.0), (0.4, 99.0), (infinity, 100.0)]
    assert quantile(buckets, 0.45) == 0.15
    assert quantile(buckets, 0.99) == 0.4
    assert quantile(buckets, 1.0) == 0.4
    assert quantile([(0.1, 0.0), (infinity, 0.0)], 0.5) is None
    assert quantile([], 0.5) is None


def test_the_log_has_a_line_for_seconds_in_which_something_happened(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics, clock = RouterMetrics(), Clock()
    lines = LoadLines(lambda: totals_of(metrics), clock)

    def told(num_in_flight: int) -> list[str]:
        caplog.clear()
        clock.now += LINE_S
        lines.tick(num_in_flight, 0)
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.INFO):
        assert told(0) == []
        serve(metrics, 10, 0.2)
        (line,) = told(2)
        assert line.startswith("load of the last 10 s requests_per_s=1.0 prompt_tokens_per_s=10.0 ")
        assert line.endswith(" in_flight=2 waiting=0")
        assert len(told(1)) == 1
        assert told(0) == []
        clock.now += LINE_S / 2
        lines.tick(9, 0)
        assert len(caplog.records) == 0
