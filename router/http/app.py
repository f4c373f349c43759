"""The HTTP application: routes, and the middleware that gives every failure one shape."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

import orjson
from aiohttp import web

from router.backend import Backend
from router.errors import RequestError, as_tandem_error
from router.http.access.access import is_for_clients
from router.http.access.cors import CrossOrigin
from router.http.apis.dialect import OPENAI, Dialect
from router.http.apis.foreign import ForeignEndpoints
from router.http.apis.messages.answer import ANTHROPIC
from router.http.apis.tokenizer_endpoints import TokenizerEndpoints
from router.http.endpoints import OpenAIEndpoints
from router.http.errors import CLIENT_CLOSED, LABELS, STATUSES, Failure, failure_from
from router.http.experts import ExpertRecordings
from router.http.openai.models import ModelEndpoints
from router.http.request_id import REQUEST_ID_KEY, request_id_of
from router.http.serving import MODEL_KEY, Serving
from router.http.wire.connections import Connections
from router.pool.members import Member
from router.pool.view import PoolView
from runtime.errors import TandemError
from runtime.logging import get_logger
from runtime.metrics.core import CONTENT_TYPE
from runtime.stragglers.rank_picture import describe
from runtime.trace.context import TRACEPARENT, TRACESTATE, TraceContext, set_trace

logger = get_logger(__name__)

NOT_OF_REQUESTS = frozenset(
    {"unknown_url", "method_not_allowed", "too_many_viewers", "cannot_record"}
)
"""Codes of what was never a request to a model: of scanners of ports, and of pages that look."""
GENERATION = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    *("/generate", "/v1/messages"),
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Middleware = Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]


def create_app(
    serving: Serving, connections: Connections, routes: Iterable[web.RouteDef] = ()
) -> web.Application:
    """The application of one router process; run it with ``handler_cancellation=True``.

    A handler is then cancelled when its client goes away, which frees the request in the workers.
    ``routes`` are served beside those of the API and of operations; `access` says what a key must
    be good for at each.
    """
    operations = Operations(serving)
    routes = [*operations.routes(), *routes]
    cross_origin = CrossOrigin(serving.section.allowed_origins)
    answering = _answer_failures(serving, connections, cross_origin)
    app = web.Application(middlewares=[answering])
    if serving.section.allowed_origins:
        app.on_response_prepare.append(cross_origin.mark)
    app.router.add_routes(api_routes(serving))
    app.router.add_routes(routes)
    return app


def api_routes(serving: Serving) -> list[web.RouteDef]:
    """All that clients call; `docs/use/api.md` lists them with the first line of each handler."""
    endpoints = OpenAIEndpoints(serving)
    foreign = ForeignEndpoints(endpoints, serving)
    models, tokenizer = ModelEndpoints(serving), TokenizerEndpoints(serving)
    return [
        web.post("/v1/chat/completions", endpoints.chat_completions),
        web.post("/v1/completions", endpoints.completions),
        web.post("/v1/responses", foreign.responses),
        web.post("/v1/responses/input_tokens", tokenizer.count_of_responses),
        web.post("/v1/messages", foreign.messages),
        web.post("/v1/messages/count_tokens", tokenizer.count_of_messages),
        web.post("/generate", foreign.generate),
        web.post("/tokenize", tokenizer.tokenize),
        web.post("/detokenize", tokenizer.detokenize),
        web.get("/v1/models", models.models),
        web.get("/v1/models/{model:.+}", models.model),
        web.get("/version", models.version),
        web.get("/server_info", models.server_info),
    ]


class Operations:
    """Handlers for those who run the cluster."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._started = time.monotonic()
        self._recordings = ExpertRecordings(serving)

    def routes(self) -> list[web.RouteDef]:
        """For the application."""
        return [
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics),
            web.get("/status", self.status),
            web.get("/targets", self.targets),
            web.get("/ranks", self.ranks),
            web.get("/experts", self.experts),
        ]

    async def health(self, request: web.Request) -> web.Response:
        """200 while the process lives."""
        return web.json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """200 when a request can be served, else 503 and what is missing.

        Of several models one is enough: the others are asked for by ``?model=NAME``. Slow ranks
        are told and keep nothing from being served.
        """
        name = request.query.get("model")
        backend = self._serving.backends.choose(name) if name else None
        missing = missing_parts(self._serving, backend)
        if missing:
            body = {"status": "not ready", "missing": missing}
            return web.json_response(body, status=503, headers={"Retry-After": "1"})
        degraded = degraded_parts(self._serving, backend)
        return web.json_response(
            {"status": "ready", **({"degraded": degraded} if degraded else {})}
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text, always of version 0.0.4."""
        return web.Response(
            body=self._serving.metrics.text(), headers={"Content-Type": CONTENT_TYPE}
        )

    async def status(self, request: web.Request) -> web.Response:
        """The pool and the load as JSON, for ``tandem status``."""
        serving = self._serving
        backends = serving.backends
        rows = [
            self._worker(member, backend.pool)
            for backend in backends
            for member in sorted(backend.pool.members(), key=lambda m: (m.role.value, m.key))
        ]
        missing = missing_parts(serving)
        body = {
            "model": backends.default.name,
            "models": [_model_status(backend) for backend in backends],
            "ready": not missing,
            "missing": missing,
            "refused": list(serving.refused),
            "degraded": degraded_parts(serving),
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._started, 3),
            "num_requests_in_flight": backends.num_in_flight,
            "num_requests_waiting": backends.num_waiting,
            "max_requests_in_flight": backends.limit,
            "recent": dataclasses.asdict(serving.recent()),
            "tiers": serving.metrics.tiers.loads(serving.metrics.sums().collect()),
            "workers": rows,
        }
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    async def targets(self, request: web.Request) -> web.Response:
        """The workers' metrics for Prometheus, as its `http_sd_configs` wants them."""
        groups = [
            {
                "targets": [member.metrics_address],
                "labels": {
                    "__meta_tandem_role": member.role.value,
                    "__meta_tandem_model": member.model,
                    "__meta_tandem_worker": str(member.key.instance),
                    "__meta_tandem_rank": str(member.key.rank),
                },
            }
            for member in self._serving.backends.members()
            if member.metrics_address
        ]
        return web.Response(body=orjson.dumps(groups), content_type="application/json")

    async def ranks(self, request: web.Request) -> web.Response:
        """Who waits for whom, and which ranks and links are slow, for ``tandem ranks``."""
        pictures = [describe(picture) for picture in self._serving.ranks]
        return web.Response(body=orjson.dumps(pictures), content_type="application/json")

    async def experts(self, request: web.Request) -> web.Response:
        """What experts get, recorded now: how even ranks are, or a trace for ``tandem experts``."""
        return await self._recordings.answer(request)

    def _worker(self, member: Member, pool: PoolView) -> dict[str, object]:
        load = pool.reported_load(member.key)
        return {
            "instance": member.key.instance,
            "rank": member.key.rank,
            "epoch": member.key.epoch,
            "role": member.role.value,
            "model": member.model,
            "address": member.address,
            "state": worker_state(member, pool.recently_failed(member.key)),
            "num_ranks": member.num_ranks,
            "max_model_len": member.max_model_len,
            "transport": member.transport,
            "metrics_address": member.metrics_address,
            "pid": member.pid,
            "num_requests_in_flight": pool.num_in_flight(member.key),
            "load": {
                "num_requests_running": load.num_requests_running,
                "num_requests_waiting": load.num_requests_waiting,
                "num_tokens_waiting": load.num_tokens_waiting,
                "num_free_blocks": load.num_free_blocks,
                "num_total_blocks": load.num_total_blocks,
                "num_quarantined_blocks": load.num_quarantined_blocks,
            },
        }


def worker_state(member: Member, recently_failed: bool) -> str:
    """``draining``, ``failing`` or ``ready``."""
    if member.draining:
        return "draining"
    return "failing" if recently_failed else "ready"


def missing_parts(serving: Serving, backend: Backend | None = None) -> list[str]:
    """What keeps this process from serving ``backend``, or any; empty when it can.

    With it, workers that would serve and are refused: one of them is what is missing.
    """
    draining = ["the router is draining"] if serving.backends.draining else []
    missing = serving.backends.missing() if backend is None else backend.readiness.missing()
    return draining + missing + (list(serving.refused) if missing else [])


def degraded_parts(serving: Serving, backend: Backend | None = None) -> list[str]:
    """What slows instances of ``backend``, or any, down: faults of ranks, by instance and kind.

    Whoever asks whether a router is ready needs no key, so no figures are in it.
    """
    members = serving.backends.members() if backend is None else backend.pool.members()
    instances = {member.key.instance for member in members}
    slow: Counter[tuple[str, str]] = Counter(
        (picture.instance, finding.kind.value)
        for picture in serving.ranks
        if picture.instance in instances
        for finding in picture.findings
        if finding.kind.is_fault
    )
    return [
        f"{instance}: {count} x {kind}. Fix: see `tandem ranks`"
        for (instance, kind), count in sorted(slow.items())
    ]


def _model_status(backend: Backend) -> dict[str, object]:
    missing = backend.readiness.missing()
    return {
        "name": backend.name,
        "aliases": backend.model.aliases,
        "ready": not missing,
        "missing": missing,
        "num_requests_in_flight": backend.admission.num_in_flight,
        "num_requests_waiting": backend.admission.num_waiting,
        "max_requests_in_flight": backend.admission.limit,
    }


def _answer_failures(
    serving: Serving, connections: Connections, cross_origin: CrossOrigin
) -> Callable[..., Awaitable[web.StreamResponse]]:
    metrics = serving.metrics
    metrics.expect(GENERATION, (200, *STATUSES), LABELS)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = request_id_of(request)
        request[REQUEST_ID_KEY] = request_id
        set_trace(_trace_of(request, serving.sample_ratio))  # anew for each request of a connection
        endpoint = request.path if request.method == "POST" else ""
        status = CLIENT_CLOSED
        asked = cross_origin.preflight(request)  # which browsers send without a key
        right = serving.gate.right_for(request) if asked is None else None
        connections.began(request.protocol)
        try:
            if right is not None:
                serving.gate.open(request, right)
            response = await handler(request) if asked is None else asked
            status = response.status
        except (asyncio.CancelledError, ConnectionError):
            logger.info("the client went away request_id=%s path=%s", request_id, request.path)
            raise
        except Exception as error:
            failure = failure_from(_as_error(error, request))
            response = _failed(failure, request_id, _dialect_at(request.path))
            status = response.status
            if failure.label not in NOT_OF_REQUESTS:
                metrics.count_error(failure.label)
        finally:
            connections.ended(request.protocol)
            if endpoint in GENERATION:
                metrics.count_request(request.get(MODEL_KEY, ""), endpoint, status)
            if right is not None:
                serving.gate.audit(request, right, request_id, status)
        if not response.prepared:
            response.headers["x-request-id"] = request_id
        return response

    return middleware


def _dialect_at(path: str) -> Dialect:
    """How failures at ``path`` are told, whether there is anything at it or not."""
    return ANTHROPIC if f"{path}/".startswith("/v1/messages/") else OPENAI


def _trace_of(request: web.Request, sample_ratio: float) -> TraceContext:
    """The client's trace, where it sends a valid one, else a new one."""
    state = request.headers.get(TRACESTATE, "")
    given = TraceContext.parse(request.headers.get(TRACEPARENT, ""), state)
    return TraceContext.begin(sample_ratio) if given is None else given.child()


def _as_error(error: Exception, request: web.Request) -> TandemError:
    """``error`` in our tree; aiohttp's own are about the URL, the method or the body's form."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return RequestError(
            f"{request.method} {request.path} is not allowed. Fix: use {allowed}",
            code="method_not_allowed",
            status=405,
            headers={"Allow": allowed},
        )
    if isinstance(error, web.HTTPNotFound):
        return _unknown_url(request)
    if isinstance(error, web.RequestPayloadError):
        return RequestError(
            "the body cannot be read with its Content-Encoding or Transfer-Encoding. "
            "Fix: send plain JSON, or what the headers say"
        )
    if isinstance(error, web.HTTPException):
        return RequestError(str(error.reason), status=error.status)
    tandem_error = as_tandem_error(error)
    if tandem_error is not error:
        logger.error("a handler failed path=%s", request.path, exc_info=error)
    return tandem_error


def _unknown_url(request: web.Request) -> RequestError:
    served = {
        resource.canonical
        for resource in request.app.router.resources()
        if isinstance(resource, web.PlainResource)
    }
    path = request.path
    while path.startswith("/v1/v1/"):
        path = path.removeprefix("/v1")
    if path != request.path and path in served:
        fix = f"use {path}: the client adds /v1 to a base URL that has it already"
    elif f"/v1{path}" in served or path.startswith("/models/"):
        fix = f"did you mean /v1{path}? The base URL of OpenAI's clients ends in /v1"
    elif path.startswith("/v1/responses/"):
        fix = "send the items of earlier answers as input: no response is stored here"
    else:
        fix = f"use one of {', '.join(sorted(filter(is_for_clients, served)))}"
    return RequestError(
        f"there is nothing at {request.method} {request.path}. Fix: {fix}",
        code="unknown_url",
        status=404,
    )


def _failed(failure: Failure, request_id: str, dialect: Dialect) -> web.Response:
    if failure.status >= 500:
        logger.warning("request failed request_id=%s error=%r", request_id, failure.message)
    return web.Response(
        body=orjson.dumps(dialect.failure(failure, request_id)),
        status=failure.status,
        content_type="application/json",
        headers=failure.headers,
    )
