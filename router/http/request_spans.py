"""The spans of a request that is over, from the moments that its choices have kept anyway.

Attributes are those of OpenTelemetry's semantic conventions for generative AI, and ``tandem.``
where there is none.
"""

from __future__ import annotations

from router.http.response import Choice, ResponseInfo
from runtime.spans import Span, Spans, Value
from runtime.trace import TraceContext

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
    """Queue, reserve, prefill, decode as the router sees them; what was not reached is absent."""
    generation = choice.generation
    times = generation.timings
    given: dict[str, Value] = {
        "tandem.choice": choice.index,
        "tandem.num_migrations": times.num_migrations,
    }
    if generation.workers is not None:
        given |= dict(
            zip(("tandem.prefill", "tandem.decode"), map(str, generation.workers), strict=True)
        )
    bounds = (
        ("queue", times.received, times.reserve_sent),
        ("reserve", times.reserve_sent, times.run_sent),
        ("prefill", times.run_sent, times.first_token),
        ("decode", times.first_token, times.last_token),
    )
    return [
        whole.below(f"router.{name}", start, end, **given)
        for name, start, end in bounds
        if start and end >= start
    ]
