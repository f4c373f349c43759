"""What a client is told of the limits of its key: in headers, and where one refuses it."""

from __future__ import annotations

import math

from router.errors import RateLimitError
from router.keys.ledger import Level, LimitKind, Verdict
from router.keys.record import LEAST_OUTPUT, KeyRecord

_LIMITS = {
    LimitKind.REQUESTS: "requests a minute",
    LimitKind.TOKENS: "tokens a minute",
    LimitKind.CONCURRENCY: "requests at once",
}


def refusal_of(
    record: KeyRecord, kind: LimitKind, verdict: Verdict, headers: dict[str, str]
) -> RateLimitError:
    """That ``record`` has used up a limit, and when to come again."""
    limits, source = record.limits, kind.value
    most = limits.most_at_once if kind is LimitKind.CONCURRENCY else getattr(limits, kind.value)
    if kind is LimitKind.CONCURRENCY and not limits.max_concurrent_requests:
        source = f"tokens_per_minute / {LEAST_OUTPUT}"
    wait_s = verdict.retry_after_s
    return RateLimitError(
        f"the key {record.name!r} may have {most} {_LIMITS[kind]} ({source}), and has used "
        f"them. Fix: retry in {wait_s:.3g} s",
        headers={
            **headers,
            "Retry-After": str(max(1, math.ceil(wait_s))),
            "retry-after-ms": str(max(1, math.ceil(wait_s * 1000))),
        },
    )


def headers_of(verdict: Verdict) -> dict[str, str]:
    """As OpenAI names them; a limit that the key does not have is left out."""
    headers: dict[str, str] = {}
    for name, level in (("requests", verdict.requests), ("tokens", verdict.tokens)):
        if level is not None:
            headers |= _headers_of_level(name, level)
    return headers


def _headers_of_level(name: str, level: Level) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(level.limit),
        f"x-ratelimit-remaining-{name}": str(level.remaining),
        f"x-ratelimit-reset-{name}": duration_text(level.reset_s),
    }


def duration_text(seconds: float) -> str:
    """``seconds``, rounded up to a millisecond, as OpenAI writes it: "6m0s", "1.2s", "20ms"."""
    total_ms = math.ceil(round(seconds * 1000, 6))
    minutes, rest_ms = divmod(total_ms, 60_000)
    if minutes:
        return f"{minutes}m{rest_ms / 1000:g}s"
    return f"{rest_ms / 1000:g}s" if rest_ms >= 1000 else f"{rest_ms}ms"
