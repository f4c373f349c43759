"""Rates and latencies from what clients saw."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engine.report import Report
from bench.pair.client import RequestLog
from bench.pair.figures import (
    describe_decode,
    describe_pair,
    describe_prefill,
    mean_context,
    spread,
    time_per_token,
)
from bench.pair.options import PairOptions
from bench.pair.run import compare

STEP_S = 0.5


def request(
    first: float, num_tokens: int, *, sent: float = 0.0, prompt_len: int = 10
) -> RequestLog:
    """A request whose tokens come one every half second, from ``first`` on."""
    arrivals = [(first + STEP_S * index, 1) for index in range(num_tokens)]
    return RequestLog(
        prompt_len=prompt_len,
        max_tokens=num_tokens,
        sent=sent,
        arrivals=arrivals,
        ended=arrivals[-1][0],
    )


def test_a_pair_in_its_steady_state() -> None:
    # One request begins and one ends every second; each has four tokens.
    logs = [request(float(n), 4, sent=n - 0.25) for n in range(20)]
    report = describe_pair(logs, (5.0, 15.0))
    assert report["requests_per_s"] == pytest.approx(1.0)
    assert report["finished_per_s"] == pytest.approx(1.0)
    assert report["input_tokens_per_s"] == pytest.approx(10.0)
    assert report["output_tokens_per_s"] == pytest.approx(4.0)
    assert report["ttft_ms"] == pytest.approx(
        {"p50": 250, "p90": 250, "p99": 250, "max": 250, "count": 10}
    )
    assert report["tpot_ms"] == pytest.approx(
        {"p50": 500, "p90": 500, "p99": 500, "max": 500, "count": 10}
    )
    assert report["num_failed"] == 0


def test_failures_are_counted_and_give_no_latencies() -> None:
    broken = RequestLog(prompt_len=10, max_tokens=4, sent=0.0, ended=6.0, error="lost")
    unfinished = RequestLog(prompt_len=10, max_tokens=4, sent=0.0)
    report = describe_pair([request(5.5, 4), broken, unfinished], (5.0, 15.0))
    assert report["num_failed"] == 2
    assert report["tpot_ms"]["count"] == 1  # type: ignore[index]


def test_prefill_alone_counts_what_ended_in_the_window() -> None:
    logs = [request(n / 4, 1) for n in range(40)]
    report = describe_prefill(logs, (2.0, 6.0))
    assert report["requests_per_s"] == pytest.approx(4.0)
    assert report["input_tokens_per_s"] == pytest.approx(40.0)


def test_decode_alone_counts_while_all_run() -> None:
    logs = [request(n / 10, 20) for n in range(5)]  # the last one decodes from 0.9 on
    report = describe_decode(logs, output_len=5)
    assert report["num_running"] == 5
    assert report["window_s"] == pytest.approx(9.5 - 0.9)
    assert report["output_tokens_per_s"] == pytest.approx(5 / STEP_S, rel=0.05)
    assert report["requests_per_s"] == pytest.approx(5 / STEP_S / 4, rel=0.05)


def test_requests_that_begin_too_late_do_not_count_as_running() -> None:
    logs = [request(0.0, 10), request(0.1, 10), request(60.0, 10)]
    report = describe_decode(logs, output_len=5)
    assert report["num_running"] == 2
    assert report["output_tokens_per_s"] == pytest.approx(2 / STEP_S, rel=0.2)


def test_no_decode_is_no_rate() -> None:
    report = describe_decode([RequestLog(prompt_len=4, max_tokens=9, sent=0.0)], output_len=5)
    assert report["requests_per_s"] == 0.0
    assert report["num_running"] == 0


@given(st.integers(2, 50), st.floats(0.001, 100.0))
def test_time_per_token_leaves_the_first_out(num_tokens: int, first: float) -> None:
    assert time_per_token(request(first, num_tokens)) == pytest.approx(STEP_S)


def test_several_tokens_of_one_event_count_each() -> None:
    log = RequestLog(prompt_len=1, max_tokens=5, sent=0, arrivals=[(1.0, 1), (2.0, 2), (3.0, 2)])
    assert time_per_token(log) == pytest.approx(0.5)


@given(st.lists(st.floats(0.0, 100.0), min_size=1))
def test_quantiles_ascend(seconds: list[float]) -> None:
    found = spread(seconds)
    assert 1e3 * min(seconds) <= found["p50"] <= found["p90"] <= found["p99"] + 1e-6
    assert found["p99"] <= 1e3 * max(seconds) + 1e-6
    assert found["count"] == len(seconds)


def test_the_ratio_is_to_the_slower_side() -> None:
    rates = {"prefill_alone": 4.0, "decode_alone": 5.0, "pair": 3.0}
    reports: dict[str, Report] = {name: {"requests_per_s": rate} for name, rate in rates.items()}
    reports["decode_alone"]["num_running"] = 8
    by_prefill = {"slower_side": "prefill", "ratio": 0.75}
    assert compare(reports, num_running=8) == by_prefill
    assert compare(reports, num_running=9) == by_prefill, "full, decode would be faster still"
    reports["prefill_alone"]["requests_per_s"] = 6.0
    assert compare(reports, num_running=8) == {"slower_side": "decode", "ratio": 0.6}
    unknown = {"slower_side": "unknown", "ratio": None}
    assert compare(reports, num_running=9) == unknown, "decode alone was not full"


def test_contexts_are_those_of_tokens_that_decode_made() -> None:
    log = RequestLog(prompt_len=10, max_tokens=6, sent=0, arrivals=[(1, 1), (2, 2), (3, 2), (4, 1)])
    assert mean_context([log], (0, 9)) == pytest.approx((11 + 12 + 13 + 14 + 15) / 5)
    assert mean_context([log], (2, 3)) == pytest.approx((13 + 14) / 2)
    assert mean_context([log], (0, 1)) is None, "the first token is prefill's"
    assert mean_context([], (0, 1)) is None


@given(
    prompt_len=st.integers(20, 200),
    output_len=st.integers(2, 40),
    decode_len=st.integers(8, 40),
    count=st.integers(1, 6),
)
def test_decode_alone_attends_to_as_much_as_the_pair(
    prompt_len: int, output_len: int, decode_len: int, count: int
) -> None:
    """Requests that began one after the other: the window in which all run is in the middle."""
    options = PairOptions(prompt_len=prompt_len, output_len=output_len, decode_len=decode_len)
    alone = [
        request(n * STEP_S, decode_len, prompt_len=options.decode_prompt_len)
        for n in range(min(count, decode_len - 3))
    ]
    found = describe_decode(alone, output_len)["mean_context"]
    pair = [request(n * STEP_S, output_len, prompt_len=prompt_len) for n in range(4 * output_len)]
    window = (output_len * STEP_S, 3 * output_len * STEP_S)
    assert found == pytest.approx(mean_context(pair, window), abs=1.5)
