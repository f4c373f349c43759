"""The spans of a run that is over: its queue, its steps, and its KV on the way."""

from __future__ import annotations

from prefill.live_runs import LiveRun
from prefill.messages import FirstTokenSampled
from runtime.trace.spans import Span, Spans


def record_run(spans: Spans, run: LiveRun, now: float) -> None:
    """Queue them, where somebody records the run's trace; ``now``: ``time.monotonic``."""
    if run.trace is None or not run.trace.is_sampled:
        return
    answer = run.answer.result() if run.answer.done() and not run.answer.cancelled() else None
    error = "" if run.error is None else run.error.code.name.lower()
    whole = Span(
        name="prefill",
        trace=run.trace,
        start=run.received,
        end=now,
        attributes={
            "tandem.request_id": run.request_id,
            "gen_ai.usage.input_tokens": run.num_context_tokens,
        },
        is_server=True,
        error=error,
    )
    parts = []
    if isinstance(answer, FirstTokenSampled):
        computing = run.received + answer.queue_s
        parts = [
            whole.below("prefill.queue", run.received, computing),
            whole.below(
                "prefill.compute",
                computing,
                run.answered_at,
                **{
                    "tandem.steps_s": round(answer.compute_s, 6),
                    "gen_ai.usage.cache_read.input_tokens": answer.num_cached_tokens,
                },
            ),
        ]
    transfer_s = max((part.timings.kv_transfer_s for part in run.parts.values()), default=0.0)
    if transfer_s and run.closed_at:
        num_bytes = sum(part.num_bytes for part in run.parts.values())
        begun = run.closed_at - transfer_s
        sent = whole.below(
            "prefill.kv_transfer", begun, run.closed_at, **{"tandem.num_bytes": num_bytes}
        )
        parts.append(sent)
    spans.record(whole, *parts)
