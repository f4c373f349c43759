"""Spans of requests on their way to a collector: made at a request's end, sent by a thread.

Nothing here is on the way of a request or a token. Whoever has the moments of a request that is
over puts its spans into a queue of bounded length; where the collector is away or slow the queue
fills, and what does not fit is dropped and counted. `runtime.trace.otlp` knows OpenTelemetry, and
is imported only where there is an endpoint.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter

from runtime.logging import get_logger
from runtime.trace.context import TraceContext

logger = get_logger(__name__)

MAX_QUEUED = 4096
BATCH = 512
INTERVAL_S = 1.0
CLOSE_S = 3.0
"""The process waits so long for the last spans at its end."""
Value = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stretch of time of one request; ``start`` and ``end`` as ``time.monotonic`` counts."""

    name: str
    trace: TraceContext
    """Of this span: its ``parent_id`` is the span above."""
    start: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    is_server: bool = False
    """Whether it answers a call from elsewhere."""
    error: str = ""
    """Why it failed; empty: it did not."""
    wall_ns: int = 0
    """What to add to the monotonic clock, in nanoseconds, for Unix time; set when it is queued."""

    def below(self, name: str, start: float, end: float, **attributes: Value) -> Span:
        """A part of this span, within it."""
        start = min(max(start, self.start), self.end)
        end = min(max(end, start), self.end)
        return Span(
            name=name, trace=self.trace.child(), start=start, end=end, attributes=attributes
        )


Export = Callable[[Sequence[Span]], bool]
"""Sends spans; whether it did. Blocks."""


class Spans:
    """The queue of one process, and the thread that empties it."""

    def __init__(self, export: Export, registry: CollectorRegistry) -> None:
        """``export`` is called by the thread alone."""
        self._export = export
        self._queue: deque[Span] = deque()
        self._counter = Counter(
            "pd_trace_spans", "Spans of requests", ["outcome"], registry=registry
        )
        self._outcomes = {
            outcome: self._counter.labels(outcome) for outcome in ("exported", "dropped", "failed")
        }
        self._wake = threading.Event()
        self._is_closing = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def record(self, *spans: Span) -> None:
        """Queue the spans of a request that is over; any thread, never blocks."""
        wall_ns = time.time_ns() - time.monotonic_ns()  # one for all, so that they fit together
        for span in spans:
            if not span.trace.is_sampled:
                continue
            if len(self._queue) >= MAX_QUEUED:
                self._outcomes["dropped"].inc()
                continue
            self._queue.append(_with_wall(span, wall_ns))
        if len(self._queue) >= BATCH:
            self._wake.set()

    def close(self) -> None:
        """Send what is queued, for a moment at most."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            try:
                is_sent = self._export(batch)
            except Exception:
                is_sent = False
                logger.exception("spans could not be exported")
            self._outcomes["exported" if is_sent else "failed"].inc(len(batch))
            if not is_sent and not self._has_failed:
                logger.warning("the collector of spans does not take them; this is said once")
            self._has_failed = not is_sent
            if not is_sent and self._is_closing:
                return


def _with_wall(span: Span, wall_ns: int) -> Span:
    return Span(
        name=span.name,
        trace=span.trace,
        start=span.start,
        end=max(span.start, span.end),
        attributes=span.attributes,
        is_server=span.is_server,
        error=span.error,
        wall_ns=wall_ns,
    )
