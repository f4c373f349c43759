"""Who may pass: the key of a request, what it may use, and what it has left.

With keys, everything needs one but what those who run the cluster ask for: ``/health``, ``/ready``,
``/metrics``, ``/status``, ``/targets`` and the console, which probes and Prometheus call without.
An endpoint that is new is closed until it is named open. Without keys nothing here does anything.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from aiohttp import web

from router.errors import AuthenticationError, ForbiddenError, RateLimitError
from router.keys.ledger import Charge, Ledger, Level, LimitKind, Verdict
from router.keys.record import KeyRecord, salt_of_tenant
from router.keys.source import KeySource
from router.metrics import RouterMetrics
from runtime.logging import get_logger

logger = get_logger(__name__)

ADMITTED = "admitted"
UNKNOWN = "unknown"
_FIX = "send `Authorization: Bearer KEY` with a key of this server (`tandem keys add`)"
_LIMITS = {
    LimitKind.REQUESTS: "requests a minute",
    LimitKind.TOKENS: "tokens a minute",
    LimitKind.CONCURRENCY: "requests at once",
}


@dataclass(slots=True, kw_only=True)
class KeyUse:
    """One request's key, and what the request has used."""

    record: KeyRecord
    outcome: str = ADMITTED
    """Why it was refused, else that it was not."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """That tell the client what it has left."""


KEY_USE: web.RequestKey[KeyUse] = web.RequestKey("key_use", KeyUse)


class Gate:
    """Lets requests in by their keys. One event loop owns it."""

    def __init__(self, source: KeySource | None, ledger: Ledger, metrics: RouterMetrics) -> None:
        """Without a ``source`` no key is asked for."""
        self._source = source
        self._ledger = ledger
        self._metrics = metrics
        self._holder = holder_of(os.getpid())
        self.follow()

    def follow(self) -> None:
        """Look whether the file of keys has changed; call it now and then."""
        if self._source is not None:
            self._metrics.set_keys(len(self._source.current()), is_stale=self._source.is_stale)

    def open(self, request: web.Request) -> None:
        """Find out whose ``request`` is, before any of its body is read.

        Raises:
            AuthenticationError: it has no key, or one that is nobody's.
        """
        if self._source is None:
            return
        key = _key_of(request)
        record = self._source.current().find(key) if key else None
        if record is None:
            self._metrics.count_key_request("", UNKNOWN)
            problem = "the API key is not known here" if key else "an API key is needed"
            raise AuthenticationError(f"{problem}. Fix: {_FIX}")
        request[KEY_USE] = KeyUse(record=record)

    def check_model(self, request: web.Request, model: str) -> None:
        """Refuse a model that the request's key may not use.

        Raises:
            ForbiddenError: it may not.
        """
        use = request.get(KEY_USE)
        if use is None or may_use(request, model):
            return
        use.outcome = "model"
        self._metrics.count_key_request(use.record.name, use.outcome)
        allowed = ", ".join(use.record.models)
        raise ForbiddenError(
            f"model = {model!r}: the key {use.record.name!r} may not use it. Fix: a key that may "
            f"(this one may use {allowed})",
            param="model",
            code="model_not_allowed",
        )

    @contextlib.asynccontextmanager
    async def admit(self, request: web.Request, num_tokens: int) -> AsyncIterator[None]:
        """Hold a place among the requests of the key, which is taken for ``num_tokens``.

        What it really used, as the request's ``KeyUse`` says at the end, is charged then.

        Raises:
            RateLimitError: the key has used up one of its limits.
        """
        use = request.get(KEY_USE)
        if use is None:
            yield
            return
        record, metrics = use.record, self._metrics
        charge = Charge(name=record.name, holder=self._holder, num_tokens=num_tokens)
        is_counted = not record.limits.is_unlimited
        if is_counted:
            verdict = await self._ledger.admit(charge, record.limits)
            use.headers = _headers_of(verdict)
            if verdict.refused_by is not None:
                use.outcome = verdict.refused_by.value
                metrics.count_key_request(record.name, use.outcome)
                raise _refusal(record, verdict.refused_by, verdict, use.headers)
        metrics.count_key_request(record.name, ADMITTED)
        try:
            yield
        finally:
            if is_counted:
                self._ledger.settle(charge, use.num_prompt_tokens + use.num_output_tokens)
            metrics.count_key_tokens(record.name, use.num_prompt_tokens, use.num_output_tokens)

    def audit(self, request: web.Request, request_id: str, status: int) -> None:
        """One line of a request that needed a key, when it has ended; never the key."""
        if self._source is None:
            return
        use = request.get(KEY_USE)
        logger.info(
            "key=%s verdict=%s status=%d method=%s path=%s request_id=%s from=%s "
            "prompt_tokens=%d output_tokens=%d",
            use.record.name if use else "-",
            use.outcome if use else UNKNOWN,
            status,
            request.method,
            # A stranger's path must not look like something else in the line.
            request.rel_url.raw_path[:200],
            request_id,
            request.remote,
            use.num_prompt_tokens if use else 0,
            use.num_output_tokens if use else 0,
        )


def holder_of(pid: int) -> str:
    """What an HTTP process is called where several count together."""
    return f"http-{pid}"


def may_use(request: web.Request, model: str) -> bool:
    """Whether the key of ``request`` may use ``model``."""
    use = request.get(KEY_USE)
    return use is None or use.record.may_use(model)


def key_of(request: web.Request) -> KeyRecord | None:
    """The key of ``request``; None where none is asked for."""
    use = request.get(KEY_USE)
    return use.record if use else None


def cache_salt_of(request: web.Request, salt: str | None) -> str:
    """The salt of the request's cached prefixes: its tenant's, and the client's own beside it."""
    use = request.get(KEY_USE)
    return salt_of_tenant(use.record.tenant if use else "", salt or "")


def count_prompt(request: web.Request, num_tokens: int) -> None:
    """``num_tokens`` of prompts were given to workers for ``request``."""
    if (use := request.get(KEY_USE)) is not None:
        use.num_prompt_tokens += num_tokens


def count_output(request: web.Request, num_tokens: int) -> None:
    """``num_tokens`` were generated for ``request``; called when it ends."""
    if (use := request.get(KEY_USE)) is not None:
        use.num_output_tokens += num_tokens


def limit_headers(request: web.Request) -> dict[str, str]:
    """What the answer says of the limits of the request's key."""
    use = request.get(KEY_USE)
    return use.headers if use else {}


def _key_of(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return request.headers.get("x-api-key", "").strip()


def _refusal(
    record: KeyRecord, kind: LimitKind, verdict: Verdict, headers: dict[str, str]
) -> RateLimitError:
    most = getattr(record.limits, kind.value)
    wait_s = verdict.retry_after_s
    return RateLimitError(
        f"the key {record.name!r} may have {most} {_LIMITS[kind]} ({kind.value}), and has used "
        f"them. Fix: retry in {wait_s:.3g} s",
        headers={
            **headers,
            "Retry-After": str(max(1, math.ceil(wait_s))),
            "retry-after-ms": str(max(1, math.ceil(wait_s * 1000))),
        },
    )


def _headers_of(verdict: Verdict) -> dict[str, str]:
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
