"""Speeds of workers from their own counters."""

from __future__ import annotations

import pytest

from router.pool.load import MergedLoad
from router.pool.members import WorkerLoad
from router.pool.rates import MeasuredRates


def load(clock_s: float, **fields: object) -> WorkerLoad:
    return WorkerLoad(clock_s=clock_s, **fields)  # type: ignore[arg-type]


def test_tokens_count_in_busy_seconds_only() -> None:
    rates = MeasuredRates()
    rates.observe(load(10.0, num_tokens_done=100, busy_s=1.0))
    rates.observe(load(90.0, num_tokens_done=1100, busy_s=3.0))
    assert rates.tokens.per_s == pytest.approx(500.0)


def test_nothing_is_said_before_anything_was_measured() -> None:
    rates = MeasuredRates()
    rates.observe(load(10.0, num_tokens_done=100, busy_s=1.0))
    assert rates.tokens.per_s == 0.0
    assert rates.received_per_s(["p/0"]) == 0.0


def test_the_latest_counts_most() -> None:
    rates = MeasuredRates()
    rates.observe(load(1.0))
    rates.observe(load(2.0, num_tokens_done=300_000, busy_s=300.0))
    rates.observe(load(3.0, num_tokens_done=900_000, busy_s=600.0))
    assert 1990.0 < rates.tokens.per_s < 2000.0


def test_reports_that_come_late_or_have_no_clock_change_nothing() -> None:
    rates = MeasuredRates()
    for report in (
        load(1.0),
        load(3.0, num_tokens_done=400, busy_s=2.0),
        load(2.0, num_tokens_done=9, busy_s=1.0),
        load(0.0, num_tokens_done=9000, busy_s=3.0),
    ):
        rates.observe(report)
    assert rates.tokens.per_s == pytest.approx(200.0)


def test_a_path_is_as_fast_as_all_parts_of_its_writer() -> None:
    rates = MeasuredRates()
    rates.observe(load(1.0, received=(("p/0", 5),), received_s=(("p/0", 1.0),)))
    both = (("p/0", 205), ("p/1", 300))
    rates.observe(load(2.0, received=both, received_s=(("p/0", 3.0), ("p/1", 1.0))))
    assert rates.received_per_s(["p/0"]) == pytest.approx(100.0)
    assert rates.received_per_s(["p/0", "p/1"]) == pytest.approx(400.0)
    assert rates.received_per_s(["p/0", "p/2"]) == 0.0


def test_a_report_that_is_no_news_of_the_load_may_still_say_how_fast() -> None:
    merged = MergedLoad()
    merged.apply(load(1.0, sequence=1))
    merged.apply(WorkerLoad(sequence=2, num_requests_running=3))
    assert not merged.apply(load(2.0, sequence=2, num_tokens_done=50, busy_s=0.5))
    assert merged.rates.tokens.per_s == pytest.approx(100.0)
    assert merged.report.num_requests_running == 3
