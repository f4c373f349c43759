"""Who may pass: the key of a request, what it may use, and what it has left.

With keys, everything needs one but ``/health``, ``/ready`` and, unless told otherwise, ``/metrics``
(`access`). What those who run the cluster look at needs a key with the right for it, or the
cluster's secret, which `tandem` shows. Without keys nothing here does anything.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from router.errors import AuthenticationError, ForbiddenError
from router.http.access.access import CONSOLE, right_for
from router.http.access.rate_limits import headers_of, refusal_of
from router.keys.ledger import CPU_S_OF_REQUEST, Charge, Ledger
from router.keys.record import KeyRecord, Right, salt_of_tenant
from router.keys.sessions import Sessions
from router.keys.source import Keyring, KeySource
from router.keys.tiers import told_of_unknown, unknown_tiers
from router.metrics.core import RouterMetrics
from router.requests.generation import Generation
from runtime.logging import get_logger
from runtime.net.credentials import Credentials
from runtime.net.roles import Role, accepting_key, refusal
from runtime.tiers import Standing, Tiers

logger = get_logger(__name__)

ADMITTED = "admitted"
UNKNOWN = "unknown"
EXPIRED = "expired"
SESSION_COOKIE = "tandem_console"
_FIX = "send `Authorization: Bearer KEY` with a key of this server (`tandem keys add`)"


@dataclass(slots=True, kw_only=True, eq=False)
class KeyUse:
    """One request's key, and what the request has used."""

    record: KeyRecord
    on_cpu: Callable[[KeyRecord, float], None]
    """Told of seconds of CPU that were spent on the request."""
    outcome: str = ADMITTED
    """Why it was refused, else that it was not."""
    num_prompt_tokens: int = 0
    generations: Sequence[Generation] = ()
    num_taken: int = 0
    """Tokens that the key's bucket has given for it so far."""
    headers: dict[str, str] = field(default_factory=dict)
    """That tell the client what it has left."""

    @property
    def num_output_tokens(self) -> int:
        """Of all choices, so far."""
        return sum(generation.num_tokens for generation in self.generations)

    @property
    def num_tokens(self) -> int:
        """Of prompts and outputs, so far."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def mask_cpu_s(self) -> float:
        """CPU that workers have used to follow the outputs by the client's grammar."""
        return sum(generation.timings.mask_cpu_s for generation in self.generations)

    @property
    def standing(self) -> Standing:
        """Among requests whose bodies are not read yet."""
        return Standing(tenant=self.record.tenant)

    def pay(self, cpu_s: float) -> None:
        """So many seconds of CPU were spent on it; maybe after it has ended."""
        self.on_cpu(self.record, cpu_s)


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
        self._sessions = Sessions(accepting_key(credentials.secret, Role.ROUTER), time.time, shared)
        self._ledger = ledger
        self._metrics = metrics
        self._holder = holder_of(os.getpid())
        self._running: set[KeyUse] = set()
        """Of keys whose tokens are limited."""
        self._cpu_s: defaultdict[str, float] = defaultdict(float)
        """By key, since the last tick."""
        self._follow()
        if source is not None and not source.current().num_operators:
            logger.info(
                "no key has the right operations: the console is closed "
                "(`tandem keys add NAME --right operations` opens it)"
            )

    def tick(self) -> None:
        """Charge what has been used since, and look at the file of keys; call it now and then."""
        more: Counter[str] = Counter()
        for use in self._running:
            num_more = use.num_tokens - use.num_taken
            if num_more > 0:
                use.num_taken += num_more
                more[use.record.name] += num_more
        for name, num_tokens in more.items():
            self._ledger.spend(name, num_tokens=num_tokens)
        for name, cpu_s in self._cpu_s.items():
            self._metrics.count_key_cpu(name, cpu_s)
        self._cpu_s.clear()
        self._follow()

    def _spent_cpu(self, record: KeyRecord, cpu_s: float) -> None:
        self._cpu_s[record.name] += cpu_s
        num_requests = cpu_s / CPU_S_OF_REQUEST - 1.0
        if num_requests > 0 and record.limits.requests_per_minute:
            self._ledger.spend(record.name, num_requests=num_requests)

    def _follow(self) -> None:
        """Look whether the file of keys has changed."""
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
            _tell_of_unknown_tiers(keys, self._tiers, self._metrics)

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
        request[KEY_USE] = use = KeyUse(record=record, on_cpu=self._spent_cpu)
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
    async def admit(
        self, request: web.Request, num_tokens: int = 0, num_open: int = 0
    ) -> AsyncIterator[None]:
        """Hold a place among the requests of the key, which is taken for ``num_tokens``.

        ``num_open`` of its choices may be as long as they like. What it really uses, as the
        request's ``KeyUse`` says, is charged while it runs and at the end. Whoever asks for no
        token needs none to be left.

        Raises:
            RateLimitError: the key has used up one of its limits.
        """
        use = request.get(KEY_USE)
        if use is None:
            yield
            return
        record, metrics = use.record, self._metrics
        charge = Charge(
            name=record.name, holder=self._holder, num_tokens=num_tokens, num_open=num_open
        )
        is_counted = not record.limits.is_unlimited
        if is_counted:
            verdict = await self._ledger.admit(charge, record.limits)
            use.headers = headers_of(verdict)
            if verdict.refused_by is not None:
                use.outcome = verdict.refused_by.value
                metrics.count_key_request(record.name, use.outcome)
                raise refusal_of(record, verdict.refused_by, verdict, use.headers)
            use.num_taken = verdict.num_tokens
            if record.limits.tokens_per_minute:
                self._running.add(use)
        metrics.count_key_request(record.name, ADMITTED)
        try:
            yield
        finally:
            if is_counted:
                self._running.discard(use)
                self._ledger.settle(charge, use.num_taken, use.num_tokens, use.num_output_tokens)
            use.pay(use.mask_cpu_s)
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


def _tell_of_unknown_tiers(keys: Keyring, tiers: Tiers, metrics: RouterMetrics) -> None:
    found = [key for key in keys.by_name.values() if unknown_tiers(tiers, key)]
    metrics.set_keys_of_unknown_tiers(len(found))
    for key in found:
        told = told_of_unknown(tiers, key)
        logger.warning("a key names a tier that is not configured key=%s %s", key.name, told)


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
