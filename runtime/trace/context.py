"""One id for a request in all processes: W3C trace context (https://www.w3.org/TR/trace-context/).

The router takes a client's ``traceparent`` header or begins a trace of its own; every gRPC call
made meanwhile carries it as metadata (`runtime.rpc.grpc_calls`), and the worker that serves the
call goes on with it; log lines end in its id. The context belongs to the task that serves the
request: engine threads have none, and tokens carry none.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, replace

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
MAX_STATE = 512
_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Which trace, and which span of it is the parent of what comes next.

    Attributes:
        trace_id: 32 hexadecimal digits, not all 0.
        span_id: 16 hexadecimal digits, not all 0.
        is_sampled: whether somebody records the trace.
        parent_id: the span above this one; empty: there is none.
        state: the ``tracestate`` header, which is handed on as it is.
    """

    trace_id: str
    span_id: str
    is_sampled: bool
    parent_id: str = ""
    state: str = ""

    @classmethod
    def begin(cls, sample_ratio: float = 0.0) -> TraceContext:
        """A new trace, which is recorded with this probability."""
        ids = os.urandom(24).hex()
        # By the id, as OpenTelemetry's own samplers do.
        is_sampled = sample_ratio > 0.0 and int(ids[16:32], 16) < sample_ratio * 2**64
        return cls(ids[:32], ids[32:], is_sampled=is_sampled)

    @classmethod
    def parse(cls, header: str, state: str = "") -> TraceContext | None:
        """What ``traceparent`` and ``tracestate`` say; None for one that is not valid."""
        found = _HEADER.fullmatch(header.strip()) if header else None
        if found is None:
            return None
        version, trace_id, span_id, flags, rest = found.groups()
        is_known = version != "ff" and not (version == "00" and rest)
        if not is_known or not int(trace_id, 16) or not int(span_id, 16):
            return None
        return cls(
            trace_id, span_id, is_sampled=bool(int(flags, 16) & _SAMPLED), state=_state(state)
        )

    @property
    def header(self) -> str:
        """The value of ``traceparent`` for what comes next."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"

    def child(self) -> TraceContext:
        """The same trace below a new span."""
        return replace(self, span_id=secrets.token_hex(8), parent_id=self.span_id)


def _state(header: str) -> str:
    """``tracestate`` as it may be handed on; what is too long or odd is left out."""
    header = header.strip()
    return header if len(header) <= MAX_STATE and header.isascii() and header.isprintable() else ""


_current: ContextVar[TraceContext | None] = ContextVar("tandem_trace", default=None)


def current_trace() -> TraceContext | None:
    """Of the request that this task serves."""
    return _current.get()


def trace_id() -> str:
    """The same for a log line; empty where there is none."""
    trace = _current.get()
    return "" if trace is None else trace.trace_id


def set_trace(trace: TraceContext | None) -> None:
    """From now on, in this task and those that it starts."""
    _current.set(trace)


@contextlib.contextmanager
def use_trace(trace: TraceContext | None) -> Iterator[None]:
    """For the length of a block."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


def without_trace() -> Context:
    """For a task that a request happens to start, and that goes on for others."""
    context = copy_context()
    context.run(_current.set, None)
    return context
