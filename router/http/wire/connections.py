"""What one process allows its connections: how many, and how long each may keep it waiting.

aiohttp has a deadline for idle connections only, so this listens to its protocol, the one place
that sees a connection before a handler does. A connection is, in turn, waiting for headers, in a
request, or idle between two requests. Three things end one: headers that do not come in time, an
answer of which the client takes nothing, and the need of a place for a newer connection. One sweep
over what is late replaces timers of each connection.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from dataclasses import dataclass

import orjson
from aiohttp import web

from router.errors import RequestError
from router.http.errors import failure_from
from router.http.wire.outbox import Outbox
from runtime.logging import get_logger

logger = get_logger(__name__)

RESERVED_FILES = 64
"""Open files left for channels to workers, logs and listening sockets; or an eighth, if more."""
LOG_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What ``Connections`` enforces."""

    max_connections: int
    header_timeout_s: float
    stall_timeout_s: float

    def within_open_files(self) -> int:
        """``max_connections``, or fewer where the process may not open so many files."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self.max_connections
        return max(1, min(self.max_connections, soft - max(RESERVED_FILES, soft // 8)))


class Connection(web.RequestHandler):
    """One connection: aiohttp's protocol, which tells ``Connections`` what happens to it."""

    __slots__ = ("_connections", "has_room", "is_chunked", "on_room", "outbox")

    def __init__(
        self, connections: Connections, server: web.Server, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(server, loop=loop, access_log=None)  # type: ignore[arg-type]
        self._connections = connections
        self.outbox = connections.outbox
        self.has_room = True
        """Whether the client takes what is sent."""
        self.is_chunked = True
        """Whether what the outbox sends has to be framed."""
        self.on_room: Callable[[], None] | None = None
        """Called when it does again; see ``Outlet``."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepted."""
        super().connection_made(transport)
        self._connections.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Gone, from either side."""
        self._connections.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of headers or of a body."""
        self._connections.received(self)
        super().data_received(data)

    def pause_writing(self) -> None:
        """The client takes less than is sent."""
        super().pause_writing()
        self.has_room = False
        self._connections.stalled(self)

    def resume_writing(self) -> None:
        """The client took most of it."""
        super().resume_writing()
        self.has_room = True
        self._connections.flows(self)
        if self.on_room is not None:
            self.on_room()

    async def room(self) -> None:
        """Return when the client takes what is sent, or is gone."""
        if self.has_room or self.transport is None:
            return
        has_room = asyncio.Event()
        self.on_room = has_room.set
        try:
            await has_room.wait()  # whose client leaves is cancelled
        finally:
            self.on_room = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP, or what went wrong outside of all handlers, and hang up."""
        if status >= 500:
            logger.error("a connection failed status=%d", status, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionResetError("the answer has begun, no other can follow")
        text = (message or "the request failed").strip().splitlines()[0][:200]
        if status < 500:
            text = f"this is no HTTP request: {text}. Fix: send HTTP/1.1"
        error = RequestError(text, status=status, code="bad_http" if status < 500 else None)
        response = web.Response(
            body=orjson.dumps(failure_from(error).body("")),
            status=status,
            content_type="application/json",
        )
        response.force_close()
        return response


class Connections:
    """All connections of one process. One event loop owns it."""

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._max = limits.within_open_files()
        self.outbox = Outbox()
        self._all: set[web.RequestHandler] = set()
        # Since when, the oldest first.
        self._headless: dict[web.RequestHandler, float] = {}
        self._idle: dict[web.RequestHandler, None] = {}
        # Bytes not taken, and since when so many.
        self._stalled: dict[web.RequestHandler, tuple[int, float]] = {}
        self._next_log = 0.0
        self._num_closed = 0
        self._draining = False

    def __len__(self) -> int:
        """How many are open."""
        return len(self._all)

    def protocol_of(self, server: web.Server) -> Callable[[], Connection]:
        """What ``loop.create_server`` makes connections with."""
        loop = asyncio.get_running_loop()
        return lambda: Connection(self, server, loop)

    def opened(self, connection: Connection) -> None:
        """Make room where there is none: for all but the oldest that says nothing."""
        self._all.add(connection)
        self._headless[connection] = self._clock()
        if len(self._all) <= self._max:
            return
        oldest = next(iter(self._headless))
        if oldest is not connection:
            self._close(oldest, None)
        elif self._idle:
            self._close(next(iter(self._idle)), None)
        else:
            self._close(connection, _BUSY)
        self._num_closed += 1
        self._log_closed()

    def received(self, connection: Connection) -> None:
        """Between requests a byte begins the next one's headers."""
        if connection in self._idle:
            del self._idle[connection]
            self._headless[connection] = self._clock()

    def began(self, connection: web.RequestHandler) -> None:
        """Its headers are complete."""
        self._headless.pop(connection, None)
        self._idle.pop(connection, None)
        if self._draining:
            connection.close()  # behind its answer

    def drain(self) -> None:
        """Keep no connection for a further request: clients come again, and reach another router.

        One that has not sent its first request yet is answered, and then closed like the others.
        """
        self._draining = True
        for connection in self._all - self._headless.keys():
            if connection in self._idle:
                connection.force_close()
            else:
                connection.close()

    def ended(self, connection: web.RequestHandler) -> None:
        """Its request is answered."""
        if connection in self._all:
            self._idle[connection] = None

    def stalled(self, connection: Connection) -> None:
        """The client does not take what is sent as fast as it comes."""
        self._stalled[connection] = (_unsent(connection), self._clock())

    def flows(self, connection: Connection) -> None:
        """It does again."""
        self._stalled.pop(connection, None)

    def forget(self, connection: web.RequestHandler) -> None:
        """It is closed."""
        self._all.discard(connection)
        self._headless.pop(connection, None)
        self._idle.pop(connection, None)
        self._stalled.pop(connection, None)

    def sweep(self) -> None:
        """End what is late; call it often."""
        now = self._clock()
        self._end_headless(now)
        self._end_stalled(now)
        self._log_closed()

    def _end_headless(self, now: float) -> None:
        late = []
        for connection, since in self._headless.items():
            if now - since < self._limits.header_timeout_s:
                break
            late.append(connection)
        for connection in late:
            self._close(connection, _LATE)
        if late:
            logger.info(
                "closed connections without complete headers num=%d router.header_timeout_s=%g",
                len(late),
                self._limits.header_timeout_s,
            )

    def _end_stalled(self, now: float) -> None:
        for connection, (num_bytes, since) in list(self._stalled.items()):
            left = _unsent(connection)
            if left != num_bytes:
                self._stalled[connection] = (left, now)
            elif now - since >= self._limits.stall_timeout_s:
                logger.warning(
                    "a client takes nothing of its answer and is cut off "
                    "unsent_bytes=%d router.client_stall_timeout_s=%g",
                    left,
                    self._limits.stall_timeout_s,
                )
                self._close(connection, None)

    def _close(self, connection: web.RequestHandler, last_words: bytes | None) -> None:
        self.forget(connection)
        transport = connection.transport
        if transport is None:
            return
        if last_words is None:
            transport.abort()
        else:
            transport.write(last_words)
            transport.close()

    def _log_closed(self) -> None:
        now = self._clock()
        if self._num_closed and now >= self._next_log:
            logger.warning(
                "the most connections are open; closed num=%d of the oldest max_connections=%d. "
                "Fix: raise router.max_connections and the limit of open files",
                self._num_closed,
                self._max,
            )
            self._num_closed = 0
            self._next_log = now + LOG_EVERY_S


def _unsent(connection: web.RequestHandler) -> int:
    transport = connection.transport
    return transport.get_write_buffer_size() if transport is not None else 0


def _last_words(status: str, message: str, code: str) -> bytes:
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    body = orjson.dumps({"error": error})
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Retry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


_BUSY = _last_words(
    "503 Service Unavailable",
    "the most connections are open (router.max_connections). Fix: retry in a moment",
    "server_is_overloaded",
)
_LATE = _last_words(
    "408 Request Timeout",
    "the request's headers did not come in time (router.header_timeout_s). Fix: send them at once",
    "timeout",
)
