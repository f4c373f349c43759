"""The spans of a request that is over, from the moments that its choices have kept anyway.

Attributes are those of OpenTelemetry's semantic conventions for generative AI, and ``tandem.``
where there is none.
"""

from __future__ import annotations

from dataclasses import replace

from router.http.openai.response import Choice, ResponseInfo
from router.pool.members import WorkerKey
from runtime.trace.context import TraceContext
from runtime.trace.spans import Span, Spans, Value

MAX_CHOICES = 8
"""Of one request that have spans of their own."""
OPERATIONS = {"chatcmpl": "chat", "cmpl": "text_completion"}
"""By what the response's id begins with."""


def record_request(
    spans: Spans, trace: TraceContext | None, info: ResponseInfo, now: float
) -> None:
    """Queue the spans of a request that ends ``now``, where somebody records it."""
    if trace is None or not trace.is_sampled or not info.choices:
        return
    operation = OPERATIONS.get(info.response_id.partition("-")[0], "chat")
    received = info.choices[0].generation.timings.received
    whole = Span(
        name=f"{operation} {info.model}",
        trace=trace,
        start=received,
        end=now,
        attributes=_attributes(operation, info),
        is_server=True,
        error="" if all(choice.text.finished for choice in info.choices) else "not finished",
    )
    parts = [part for choice in info.choices[:MAX_CHOICES] for part in _parts(whole, choice)]
    spans.record(whole, *parts)


def _attributes(operation: str, info: ResponseInfo) -> dict[str, Value]:
    first = info.choices[0].generation
    prompts = {id(choice.prompt): len(choice.prompt.token_ids) for choice in info.choices}
    ttft_s = first.timings.first_token - first.timings.received
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": info.model,
        "gen_ai.response.model": info.model,
        "gen_ai.response.id": info.response_id,
        "gen_ai.request.max_tokens": first.sampling.max_tokens,
        "gen_ai.request.temperature": first.sampling.temperature,
        "gen_ai.request.top_p": first.sampling.top_p,
        "gen_ai.request.choice.count": len(info.choices),
        "gen_ai.usage.input_tokens": sum(prompts.values()),
        "gen_ai.usage.output_tokens": sum(c.generation.num_tokens for c in info.choices),
        "gen_ai.usage.cache_read.input_tokens": first.num_cached_tokens,
    }
    return {**attributes, "tandem.ttft_s": round(ttft_s, 6)} if ttft_s > 0 else attributes


def _parts(whole: Span, choice: Choice) -> list[Span]:
    """Queue, reserve, prefill, decode as the router sees them; what was not reached is absent.

    Of a choice that moved, its attempts as well.
    """
    generation = choice.generation
    times = generation.timings
    given: dict[str, Value] = {
        "tandem.choice": choice.index,
        "tandem.num_migrations": times.num_migrations,
    }
    latest = _named(generation.workers)
    # The pair of the first token, where others took over after it.
    first = next((_named(past.workers) for past in generation.past if past.num_tokens), latest)
    bounds = (
        ("queue", times.received, times.reserve_sent, first),
        ("reserve", times.reserve_sent, times.run_sent, first),
        ("prefill", times.run_sent, times.first_token, first),
        ("decode", times.first_token, max(times.first_token, times.last_token), latest),
    )
    stages = [
        whole.below(f"router.{name}", start, end, **given, **workers)
        for name, start, end, workers in bounds
        if start and end >= start
    ]
    return stages + _attempts(whole, choice)


def _attempts(whole: Span, choice: Choice) -> list[Span]:
    """Each attempt of a choice that has had several: who served it, and why it ended.

    A worker that died has sent nothing: this is all that its part of the trace has.
    """
    generation = choice.generation
    if not generation.past:
        return []
    spans, num_tokens = [], 0
    for number, past in enumerate(generation.past):
        told = {
            "tandem.choice": choice.index,
            "tandem.attempt": number,
            "tandem.request_id": past.request_id,
            "gen_ai.usage.output_tokens": past.num_tokens - num_tokens,
            **_named(past.workers),
        }
        num_tokens = past.num_tokens
        span = whole.below("router.attempt", past.started, past.ended, **told)
        spans.append(replace(span, error=past.reason))
    started = generation.timings.attempt_started
    if started > generation.past[-1].started:
        told = {
            "tandem.choice": choice.index,
            "tandem.attempt": len(generation.past),
            "tandem.request_id": generation.worker_request_id,
            "gen_ai.usage.output_tokens": generation.num_tokens - num_tokens,
            **_named(generation.workers),
        }
        span = whole.below("router.attempt", started, whole.end, **told)
        spans.append(span if choice.text.finished else replace(span, error="not finished"))
    return spans


def _named(workers: tuple[WorkerKey, WorkerKey] | None) -> dict[str, Value]:
    """The attributes that say who a pair is."""
    if workers is None:
        return {}
    return {"tandem.prefill": str(workers[0]), "tandem.decode": str(workers[1])}
