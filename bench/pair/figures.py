"""Figures of a phase, from what its clients saw. Pure.

Rates count what arrived in a window, of requests that began before or ended after it too. The
key idea for decode alone: between the moment at which the last request began to decode and that at
which the first one ended, every request ran, and prefill had nothing to do. Its answers are longer
than the pair's and its prompts so much shorter that contexts are as long in the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.engine.report import Report, quantile
from bench.pair.client import RequestLog

Window = tuple[float, float]


def describe_pair(logs: Sequence[RequestLog], window: Window) -> Report:
    """Rates of both sides together, latencies of requests that ended in the window."""
    prompt_len, output_len = _sizes(logs)
    seconds = window[1] - window[0]
    tokens = _tokens_in(logs, window)
    began = [log for log in logs if log.arrivals and _is_in(log.arrivals[0][0], window)]
    ended = [log for log in logs if log.is_over and _is_in(log.ended, window)]
    return {
        "window_s": seconds,
        "requests_per_s": tokens / output_len / seconds,
        "input_tokens_per_s": len(began) * prompt_len / seconds,
        "output_tokens_per_s": tokens / seconds,
        "mean_context": mean_context(logs, window),
        "prefilled_per_s": len(began) / seconds,
        "finished_per_s": len(ended) / seconds,
        "ttft_ms": spread(log.arrivals[0][0] - log.sent for log in ended),
        "tpot_ms": spread(map(time_per_token, ended)),
        "request_ms": spread(log.ended - log.sent for log in ended),
        "stages_ms": describe_stages(ended),
        "num_requests": len(logs),
        "num_failed": count_failed(logs),
    }


def describe_prefill(logs: Sequence[RequestLog], window: Window) -> Report:
    """Rates of prefill alone: requests of one token each."""
    prompt_len, _ = _sizes(logs)
    seconds = window[1] - window[0]
    ended = [log for log in logs if log.is_over and _is_in(log.ended, window)]
    return {
        "window_s": seconds,
        "requests_per_s": len(ended) / seconds,
        "input_tokens_per_s": len(ended) * prompt_len / seconds,
        "stages_ms": describe_stages(ended),
        "num_requests": len(logs),
        "num_failed": count_failed(logs),
    }


def describe_decode(logs: Sequence[RequestLog], output_len: int) -> Report:
    """Rates of decode alone, as requests of ``output_len`` tokens, the first of them prefill's."""
    running, (began, ended) = all_run_in(logs)
    rate = _tokens_in(running, (began, ended)) / (ended - began) if running else 0.0
    return {
        "window_s": ended - began,
        "requests_per_s": rate / (output_len - 1),
        "output_tokens_per_s": rate,
        "mean_context": mean_context(running, (began, ended)),
        "num_running": len(running),
        "step_ms": 1e3 * len(running) / rate if rate else None,
        "num_requests": len(logs),
        "num_failed": count_failed(logs),
    }


def all_run_in(logs: Sequence[RequestLog]) -> tuple[list[RequestLog], Window]:
    """The requests of decode alone that ran at once, and the moments between which all did."""
    over = [log for log in logs if log.is_over and len(log.arrivals) > 1]
    ended = min((log.ended for log in over), default=0.0)
    running = [log for log in over if log.arrivals[1][0] < ended]
    began = max((log.arrivals[1][0] for log in running), default=ended)
    return running, (began, ended)


def mean_context(logs: Iterable[RequestLog], window: Window) -> float | None:
    """Tokens that a decode step attended to for a request, in the mean over the window's tokens.

    Those of an answer but the first, which is prefill's; None where there are none.
    """
    total = number = 0
    for log in logs:
        index = 0  # of the next token in the answer
        for moment, count in log.arrivals:
            first, index = max(index, 1), index + count
            if _is_in(moment, window) and index > first:
                number += index - first
                total += sum(range(log.prompt_len + first, log.prompt_len + index))
    return total / number if number else None


def time_per_token(log: RequestLog) -> float:
    """Seconds from one token to the next after the first, in the mean; at least two tokens."""
    first, last = log.arrivals[0], log.arrivals[-1]
    return (last[0] - first[0]) / max(log.num_tokens - first[1], 1)


def describe_stages(logs: Sequence[RequestLog]) -> dict[str, dict[str, float]]:
    """Quantiles of every stage that the router told of."""
    # Beside the stages it tells of moves and drafts, which are no times.
    names = sorted({name for log in logs for name in log.timings if name.endswith("_s")})
    return {
        name.removesuffix("_s"): spread(log.timings[name] for log in logs if name in log.timings)
        for name in names
    }


def spread(seconds: Iterable[float]) -> dict[str, float]:
    """Median and tail in milliseconds; all 0 where there is nothing."""
    ordered = sorted(seconds)
    # The last one too: what happens once in a window is not seen at 99 %.
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    found = {name: 1e3 * quantile(ordered, q) if ordered else 0.0 for name, q in shares.items()}
    return {**found, "count": len(ordered)}


def count_failed(logs: Sequence[RequestLog]) -> int:
    """Requests that did not get their whole answer."""
    return sum(not log.is_over for log in logs)


def _sizes(logs: Sequence[RequestLog]) -> tuple[int, int]:
    """Tokens in and out, of requests that are all alike."""
    sizes = {(log.prompt_len, log.max_tokens) for log in logs}
    assert len(sizes) == 1, sizes
    return sizes.pop()


def _tokens_in(logs: Iterable[RequestLog], window: Window) -> int:
    return sum(count for log in logs for moment, count in log.arrivals if _is_in(moment, window))


def _is_in(moment: float, window: Window) -> bool:
    return window[0] < moment <= window[1]
