"""What the router did in the last seconds: rates, and times to the first token.

Differences of its counters, which are read on a timer: neither a request nor a token costs more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import Metric

from runtime.logging import fields, get_logger

logger = get_logger(__name__)

SAMPLE_S = 5.0
"""Between two readings of the counters; a window is between one and two of these long."""
LINE_S = 10.0
"""Between two lines of the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What was counted since the start."""

    num_requests: float = 0.0
    num_prompt_tokens: float = 0.0
    num_output_tokens: float = 0.0
    first_tokens: tuple[tuple[float, float], ...] = ()
    """Upper bound of seconds, and requests whose first token took at most that; bounds rise."""

    @classmethod
    def of(cls, families: Iterable[Metric]) -> Totals:
        """From the router's metrics."""
        counts = {"pd_router_requests_total": 0.0, "prompt": 0.0, "output": 0.0}
        buckets: dict[float, float] = {}  # of all models
        for sample in (sample for family in families for sample in family.samples):
            if sample.name == "pd_router_requests_total":
                counts[sample.name] += sample.value
            elif sample.name == "pd_router_tokens_total" and sample.labels["kind"] in counts:
                counts[sample.labels["kind"]] += sample.value
            elif sample.name == "pd_ttft_seconds_bucket":
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
        return cls(
            num_requests=counts["pd_router_requests_total"],
            num_prompt_tokens=counts["prompt"],
            num_output_tokens=counts["output"],
            first_tokens=tuple(sorted(buckets.items())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """The last seconds."""

    window_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float | None
    """None: no first token in the window."""
    ttft_p99_s: float | None

    @classmethod
    def between(cls, before: Totals, now: Totals, window_s: float) -> Recent:
        """What was done from ``before`` to ``now``."""
        former = dict(before.first_tokens)
        counts = [(bound, count - former.get(bound, 0.0)) for bound, count in now.first_tokens]
        return cls(
            window_s=round(window_s, 1),
            requests_per_s=_rate(now.num_requests - before.num_requests, window_s),
            prompt_tokens_per_s=_rate(now.num_prompt_tokens - before.num_prompt_tokens, window_s),
            output_tokens_per_s=_rate(now.num_output_tokens - before.num_output_tokens, window_s),
            ttft_p50_s=quantile(counts, 0.5),
            ttft_p99_s=quantile(counts, 0.99),
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing was done."""
        return not (self.requests_per_s or self.prompt_tokens_per_s or self.output_tokens_per_s)


def _rate(count: float, seconds: float) -> float:
    return round(max(0.0, count) / seconds, 2) if seconds > 0 else 0.0


def quantile(cumulative: Iterable[tuple[float, float]], share: float) -> float | None:
    """The value below which ``share`` of the observations are, as far as buckets tell.

    ``cumulative`` has upper bounds, rising, and how many observations are not above them.
    """
    buckets = list(cumulative)
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= share * total:
            if bound == float("inf"):
                return lower  # beyond the last bound nothing more is known
            return round(lower + (bound - lower) * (share * total - below) / (count - below), 4)
        lower, below = bound, count
    return lower


class RecentWindow:
    """Readings of the counters, a few seconds apart. One event loop owns it."""

    def __init__(self, read: Callable[[], Totals], clock: Callable[[], float]) -> None:
        self._read, self._clock = read, clock
        self._samples = deque([(clock(), read())], maxlen=3)

    def tick(self) -> None:
        """Called often; reads when it is time."""
        if self._clock() - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((self._clock(), self._read()))

    def recent(self) -> Recent:
        """The time since the last reading but one, or since the start."""
        now = self._clock()
        began, before = next(
            (sample for sample in reversed(self._samples) if now - sample[0] >= SAMPLE_S),
            self._samples[0],
        )
        return Recent.between(before, self._read(), now - began)


class LoadLines:
    """One line of the log every ten seconds in which something happened."""

    def __init__(self, read: Callable[[], Totals], clock: Callable[[], float]) -> None:
        self._read, self._clock = read, clock
        self._told_at, self._told = clock(), read()

    def tick(self, num_in_flight: int, num_waiting: int) -> None:
        """Called often; tells when it is time."""
        now = self._clock()
        if now - self._told_at < LINE_S:
            return
        totals = self._read()
        recent = Recent.between(self._told, totals, now - self._told_at)
        self._told_at, self._told = now, totals
        if recent.is_idle and not num_in_flight and not num_waiting:
            return
        ttft = "-" if recent.ttft_p50_s is None else f"{recent.ttft_p50_s:.3f}"
        numbers = fields(
            requests_per_s=recent.requests_per_s,
            prompt_tokens_per_s=recent.prompt_tokens_per_s,
            output_tokens_per_s=recent.output_tokens_per_s,
            ttft_p50_s=ttft,
            in_flight=num_in_flight,
            waiting=num_waiting,
        )
        logger.info("load of the last %.0f s %s", recent.window_s, numbers)
