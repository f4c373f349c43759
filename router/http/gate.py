"""Who may pass: the key of a request, what it may use, and what it has left.

With keys, everything needs one but ``/health``, ``/ready`` and, unless told otherwise, ``/metrics``
(`access`). What those who run the cluster look at needs a key with the right for it, or the
cluster's secret, which `tandem` shows. Without keys nothing here does anything.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from router.errors import AuthenticationError, ForbiddenError, RateLimitError
from router.http.access import CONSOLE, right_for
from router.keys.ledger import Charge, Ledger, Level, LimitKind, Verdict
from router.keys.record import KeyRecord, Right, salt_of_tenant
from router.keys.sessions import Sessions
from router.keys.source import Keyring, KeySource
from router.keys.tiers import told_of_unknown, unknown_tiers
from router.metrics import RouterMetrics
from runtime.logging import get_logger
from runtime.net import Credentials
from runtime.roles import Role, accepting_key, refusal
from runtime.tiers import Tiers

logger = get_logger(__name__)

ADMITTED = "admitted"
UNKNOWN = "unknown"
EXPIRED = "expired"
SESSION_COOKIE = "tandem_console"
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

    def __init__(
        self,
        source: KeySource | None,
        ledger: Ledger,
        metrics: RouterMetrics,
        credentials: Credentials,
        *,
        tiers: Tiers,
        metrics_are_open: bool = True,
    ) -> None:
        """Without a ``source`` no key is asked for; ``metrics_are_open``: to whoever asks.

        Keys that name none of ``tiers`` are told of.
        """
        self._source = source
        self._tiers = tiers
        self._told_of: Keyring | None = None
        self._credentials = credentials
        self._metrics_are_open = metrics_are_open
        shared = Path(metrics.shared_dir) if metrics.shared_dir else None
        key = accepting_key(credentials.secret, Role.ROUTER)
        self._sessions = Sessions(key, time.time, shared)
        self._ledger = ledger
        self._metrics = metrics
        self._holder = holder_of(os.getpid())
        self.follow()
        if source is not None and not source.current().num_operators:
            logger.info(
                "no key has the right operations: the console is closed "
                "(`tandem keys add NAME --right operations` opens it)"
            )

    def follow(self) -> None:
        """Look whether the file of keys has changed; call it now and then."""
        if self._source is None:
            return
        keys = self._source.current()
        self._metrics.set_keys(len(keys), is_stale=self._source.is_stale)
        if keys is not self._told_of:
            if self._told_of is not None:
                logger.info(
                    "the list of API keys has changed %s", keys.changed_since(self._told_of)
                )
            self._told_of = keys
            self._tell_of_unknown_tiers(keys)

    def _tell_of_unknown_tiers(self, keys: Keyring) -> None:
        found = [key for key in keys.by_name.values() if unknown_tiers(self._tiers, key)]
        self._metrics.set_keys_of_unknown_tiers(len(found))
        for key in found:
            logger.warning(
                "a key names a tier that is not configured key=%s %s",
                key.name,
                told_of_unknown(self._tiers, key),
            )

    @property
    def asks_for_keys(self) -> bool:
        """Whether there are any."""
        return self._source is not None

    def right_for(self, request: web.Request) -> Right | None:
        """What the key of ``request`` must be good for; None: it needs none."""
        if self._source is None:
            return None
        return right_for(request.path, metrics_are_open=self._metrics_are_open)

    def open(self, request: web.Request, right: Right) -> None:
        """Find out whose ``request`` is, before any of its body is read.

        Raises:
            AuthenticationError: it has no key, or one that is nobody's.
            ForbiddenError: its key has not this ``right``.
        """
        if self._has_secret(request, right):
            return
        record = self._owner_of(request)
        if record is None:
            self._metrics.count_key_request("", UNKNOWN)
            is_unknown = bool(_key_of(request))
            problem = "the API key is not known here" if is_unknown else "an API key is needed"
            raise AuthenticationError(f"{problem}. Fix: {_FIX}")
        request[KEY_USE] = use = KeyUse(record=record)
        if record.has_expired(time.time()):
            use.outcome = EXPIRED
            self._metrics.count_key_request(record.name, use.outcome)
            raise AuthenticationError(
                f"the API key {record.name!r} expired at {record.end}. Fix: a key that has not"
            )
        if not record.may(right):
            use.outcome = "right"
            self._metrics.count_key_request(record.name, use.outcome)
            raise ForbiddenError(
                f"{request.path}: the key {record.name!r} has not the right {right.value!r}. "
                f"Fix: a key that has it (`tandem keys add NAME --right {right.value}`)",
                param=None,
                code="right_missing",
            )

    def may_look(self, request: web.Request) -> bool:
        """Whether whoever sent ``request`` may look at the cluster, at this moment."""
        if self._source is None or self._has_secret(request, Right.OPERATIONS):
            return True
        record = self._owner_of(request)
        if record is None or record.has_expired(time.time()):
            return False
        return record.may(Right.OPERATIONS)

    def sign_in(self, key: str) -> tuple[str, str]:
        """A session for the owner of ``key``, and why there is none: EXPIRED, UNKNOWN, "right"."""
        record = self._source.current().find(key) if self._source is not None else None
        outcome = ""
        if record is None:
            outcome = UNKNOWN
        elif record.has_expired(time.time()):
            outcome = EXPIRED
        elif not record.may(Right.OPERATIONS):
            outcome = "right"
        if record is not None and not outcome:
            return self._sessions.begin(record), ""
        name = record.name if record is not None else ""
        self._metrics.count_key_request(name, outcome)
        logger.info("key=%s verdict=%s sign-in to the console refused", name or "-", outcome)
        return "", outcome

    def sign_out(self, request: web.Request) -> None:
        """End the session of ``request``, if it has one."""
        if self._source is not None:
            session = request.cookies.get(SESSION_COOKIE, "")
            self._sessions.end(session, self._source.current())

    def _owner_of(self, request: web.Request) -> KeyRecord | None:
        assert self._source is not None
        keys, key = self._source.current(), _key_of(request)
        if key:
            return keys.find(key)
        session = request.cookies.get(SESSION_COOKIE, "")
        if session and request.path.startswith(CONSOLE):
            return self._sessions.owner(session, keys)
        return None

    def _has_secret(self, request: web.Request, right: Right) -> bool:
        key = _key_of(request)
        is_for_people = right is not Right.INFERENCE
        roles = self._credentials.roles_of(_bytes_of(key)) if is_for_people and key else frozenset()
        return not refusal("Http", "look", roles)

    def check_model(self, request: web.Request, names: Sequence[str]) -> None:
        """Refuse a model, of these ``names``, that the request's key may not use.

        Raises:
            ForbiddenError: it may not.
        """
        if self._source is None:
            return
        use = request.get(KEY_USE)
        if use is None or may_use(request, names):
            return
        use.outcome = "model"
        self._metrics.count_key_request(use.record.name, use.outcome)
        allowed = ", ".join(use.record.models)
        raise ForbiddenError(
            f"model = {names[0]!r}: the key {use.record.name!r} may not use it. Fix: a key that "
            f"may (this one may use {allowed})",
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

    def audit(self, request: web.Request, right: Right, request_id: str, status: int) -> None:
        """One line of a request that needed a key, when it has ended; never the key.

        Those who look at the cluster ask again and again: only refusals are told of.
        """
        use = request.get(KEY_USE)
        is_refused = use is None or use.outcome != ADMITTED
        if right is not Right.INFERENCE and not (is_refused and status in (401, 403)):
            return
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


def may_use(request: web.Request, names: Sequence[str]) -> bool:
    """Whether the key of ``request`` may use the model of these ``names``."""
    use = request.get(KEY_USE)
    return use is None or use.record.may_use(names)


def key_of(request: web.Request) -> KeyRecord | None:
    """The key of ``request``; None where none is asked for."""
    use = request.get(KEY_USE)
    return use.record if use else None


def use_of(request: web.Request) -> KeyUse | None:
    """What ``request`` uses of its key; None where none is asked for."""
    return request.get(KEY_USE)


def cache_salt_of(use: KeyUse | None, salt: str | None) -> str:
    """The salt of a request's cached prefixes: its tenant's, and the client's own beside it."""
    return salt_of_tenant(use.record.tenant if use else "", salt or "")


def _key_of(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return request.headers.get("x-api-key", "").strip()


def _bytes_of(key: str) -> bytes:
    return key.encode(errors="surrogateescape")


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
