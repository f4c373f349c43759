"""The spans of a request that is over at a decode rank: from its place to its last token."""

from __future__ import annotations

from decode.requests import DecodeRequest
from runtime.sampling import FinishReason
from runtime.trace.spans import Span, Spans


def record_request(spans: Spans, request: DecodeRequest, reason: FinishReason, now: float) -> None:
    """Queue them, where somebody records the request's trace; ``now``: ``time.monotonic``."""
    trace = request.trace
    if trace is None or not trace.is_sampled:
        return
    has_failed = reason in (FinishReason.ABORT, FinishReason.ERROR)
    whole = Span(
        name="decode",
        trace=trace,
        start=request.reserved_at,
        end=now,
        attributes={
            "tandem.request_id": request.request_id,
            "gen_ai.response.finish_reasons": [reason.value],
            "gen_ai.usage.output_tokens": request.request.num_output_tokens,
        },
        is_server=True,
        error=reason.value if has_failed else "",
    )
    bounds = (
        ("reserved", request.reserved_at, request.claimed_at),
        ("blocks", request.claimed_at, request.allocated_at),
        ("kv", request.allocated_at, request.arrived_at),
        ("admission", request.arrived_at, request.started_at),
        ("steps", request.started_at, now),
    )
    parts = [
        whole.below(f"decode.{name}", start, end)
        for name, start, end in bounds
        if start and end >= start
    ]
    spans.record(whole, *parts)
