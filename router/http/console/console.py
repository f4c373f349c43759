"""The console's handlers, and its clock: when a snapshot is built, and for whom."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

import orjson
from aiohttp import web

from router.errors import RequestError
from router.http.console.observer import Observer
from router.http.console.page import load_page
from router.http.console.sign_in import SignIn
from router.http.experts import ExpertRecordings
from router.http.serving import Serving
from router.http.wire import sse
from router.http.wire.connections import Connections
from router.pool.journal import PoolJournal
from runtime.logging import get_logger

logger = get_logger(__name__)

INTERVAL_S = 1.0
MAX_VIEWERS = 64
"""Streams at once, of one process."""
RETRY = b"retry: 2000\n\n"
"""A page that lost its stream asks again after so many milliseconds."""


class Console:
    """Of one HTTP process. Its event loop calls ``tick`` every half second or so."""

    def __init__(
        self,
        serving: Serving,
        connections: Connections,
        journal: PoolJournal,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``wall`` is the wall clock."""
        self._observer = Observer(serving, connections, journal, wall)
        self._gate = serving.gate
        self._page = load_page(asks_for_keys=self._gate.asks_for_keys)
        self._sign_in = SignIn(self._gate)
        self._recordings = ExpertRecordings(serving)
        self._loop = asyncio.get_running_loop()
        self._num_viewers = 0
        self._built_at = -INTERVAL_S
        self._snapshot = b""
        """The last one, as JSON."""
        self._history = b""
        self._history_number = -1
        self._next_frame = asyncio.Event()
        self._closed = False
        self._has_failed = False

    def routes(self) -> list[web.RouteDef]:
        """For the application."""
        return [
            web.get("/", self.root),
            web.get("/console", self.page),
            web.get("/console/data", self.data),
            # As /experts, where a browser's session counts; who records there waits for no page.
            web.get("/console/experts", self._recordings.answer),
            *self._sign_in.routes(),
        ]

    async def root(self, request: web.Request) -> web.Response:
        """A browser is sent to the page; for anybody else there is nothing here."""
        if "text/html" not in request.headers.get("Accept", ""):
            raise web.HTTPNotFound
        return web.Response(status=302, headers={"Location": "/console", "Vary": "Accept"})

    async def page(self, request: web.Request) -> web.Response:
        """``GET /console``; to who may not look, a page that asks for a key."""
        if not self._gate.may_look(request):
            return self._sign_in.page()
        if request.headers.get("If-None-Match") == self._page.etag:
            return web.Response(status=304, headers=self._page.headers)
        return web.Response(body=self._page.body, headers=self._page.headers)

    async def data(self, request: web.Request) -> web.StreamResponse:
        """``GET /console/data``: a stream of snapshots; to who asks for no stream, one of them."""
        if "text/event-stream" not in request.headers.get("Accept", ""):
            self._build(if_older_than_s=INTERVAL_S)
            return web.Response(body=self._snapshot, content_type="application/json")
        with self._viewer():
            response = web.StreamResponse(headers=sse.HEADERS)
            await response.prepare(request)
            await self._stream(response, lambda: self._gate.may_look(request))
            await response.write_eof()
            return response

    def tick(self, loop_lag_s: float) -> None:
        """Keep history; build what viewers wait for. A fault here must not end the router."""
        try:
            self._observer.keep_history(loop_lag_s)
            self._observer.tell_others()
            if self._num_viewers and self._build(if_older_than_s=0.75 * INTERVAL_S):
                self._announce()
        except Exception:
            if not self._has_failed:
                logger.exception("the console failed; this is said once")
            self._has_failed = True

    def close(self) -> None:
        """End all streams: the process is about to end."""
        self._closed = True
        self._announce()

    @contextlib.contextmanager
    def _viewer(self) -> Iterator[None]:
        if self._num_viewers >= MAX_VIEWERS:
            raise RequestError(
                f"{MAX_VIEWERS} pages look at this process already. Fix: close one of them",
                code="too_many_viewers",
                status=503,
            )
        self._num_viewers += 1
        try:
            yield
        finally:
            self._num_viewers -= 1

    async def _stream(self, response: web.StreamResponse, may_look: Callable[[], bool]) -> None:
        self._build(if_older_than_s=INTERVAL_S)
        await response.write(RETRY)
        history_number = -1
        while not self._closed and may_look():  # a session may end meanwhile, or its key
            frame = b"event: snapshot\ndata: " + self._snapshot + b"\n\n"
            if self._history_number != history_number:
                history_number = self._history_number
                frame = b"event: history\ndata: " + self._history + b"\n\n" + frame
            next_frame = self._next_frame
            await response.write(frame)
            await next_frame.wait()

    def _build(self, *, if_older_than_s: float) -> bool:
        """Build the next snapshot, for everybody; whether it was time to."""
        now = self._loop.time()
        if now - self._built_at < if_older_than_s:
            return False
        self._built_at = now
        snapshot, history = self._observer.snapshot()
        self._snapshot = orjson.dumps(snapshot)
        if history.number != self._history_number:
            self._history_number = history.number
            self._history = orjson.dumps(history)
        return True

    def _announce(self) -> None:
        self._next_frame.set()
        self._next_frame = asyncio.Event()
