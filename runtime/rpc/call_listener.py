"""The listening socket of calls, and those who have not shown the cluster's secret yet.

A stranger costs a file descriptor, a task and, with TLS, the state of a handshake. So many may wait
at once; when one more comes, the oldest is cut off. A caller shows its secret as soon as it is
connected, so it is never the oldest for long, and no number of strangers keeps it out. TLS and the
greeting have one limit of time together, however their bytes drip.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

import grpc

from runtime.background import BackgroundTasks
from runtime.logging import get_logger
from runtime.net.credentials import Credentials, Listen, roles_of_peer
from runtime.net.roles import Roles
from runtime.net.sockets import open_listener
from runtime.pb import calls_pb2, common_pb2
from runtime.rpc.call_connection import (
    MAX_GREETING_BYTES,
    CallConnection,
    ConnectionOwner,
    read_greeting,
)
from runtime.rpc.wire import why_refused

logger = get_logger(__name__)

MAX_STRANGERS = 64
GREETING_S = 5.0
WRONG_SECRET = "the cluster's secret is missing or wrong"
_TLS_GOODBYE_S = 2.0
_ACCEPT_PAUSE_S = 0.05

Welcome = Callable[[CallConnection, Roles], tuple[ConnectionOwner, int]]
"""Whom the connection of a caller of these roles is for, and the longest message that it may
send."""


class CallListener:
    """Listens, and hands over the connections of callers. One event loop owns it."""

    def __init__(self, credentials: Credentials, welcome: Welcome) -> None:
        self._loop = asyncio.get_running_loop()
        self._credentials = credentials
        self._welcome = welcome
        self._listener: socket.socket | None = None
        self._tls: ssl.SSLContext | None = None
        self._strangers: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._tasks = BackgroundTasks()

    @property
    def num_strangers(self) -> int:
        """Connections whose greeting is awaited."""
        return len(self._strangers)

    def open(self, listen: Listen, field: str) -> int:
        """Listen where ``listen`` says; the port.

        Raises:
            ConfigError: the port is taken, and ``field`` names the setting it comes from; or a file
                of TLS cannot be used.
        """
        self._tls = self._credentials.server_ssl_context()
        self._listener = open_listener(listen.bind, listen.port, field=field)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept, self._listener)
        port: int = self._listener.getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop listening, and cut all strangers off."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        await self._tasks.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # The client was gone before it was accepted, or we are out of file descriptors.
            logger.warning("accept: %s", error)
            self._loop.remove_reader(listener)
            self._loop.call_later(_ACCEPT_PAUSE_S, self._accept_again)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        stranger = _Stranger(sock, self._credentials, self._welcome)
        task = self._tasks.start(self._meet(stranger), name="stranger")
        self._strangers[task] = None
        task.add_done_callback(lambda task: self._strangers.pop(task, None))
        task.add_done_callback(lambda _: stranger.cut_off())

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept, self._listener)

    async def _meet(self, stranger: _Stranger) -> None:
        """Let a stranger become a caller in its time."""
        has_tls = self._tls is not None
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(GREETING_S):
                await self._loop.connect_accepted_socket(
                    lambda: CallConnection(stranger, MAX_GREETING_BYTES),
                    stranger.give_socket(),
                    ssl=self._tls,
                    ssl_handshake_timeout=GREETING_S if has_tls else None,
                    ssl_shutdown_timeout=_TLS_GOODBYE_S if has_tls else None,
                )
                await stranger.is_over


class _Stranger:
    """The owner of a connection until its greeting."""

    def __init__(self, sock: socket.socket, credentials: Credentials, welcome: Welcome) -> None:
        self._sock: socket.socket | None = sock
        """Until it is a connection's."""
        self._credentials = credentials
        self._welcome = welcome
        self._connection: CallConnection | None = None
        """While it is ours."""
        self.is_over = asyncio.get_running_loop().create_future()
        """Done when it is a stranger no more."""

    def give_socket(self) -> socket.socket:
        """It has an owner from now on, who closes it."""
        sock, self._sock = self._sock, None
        assert sock is not None
        return sock

    def opened(self, connection: CallConnection) -> None:
        """See `ConnectionOwner`."""
        self._connection = connection

    def take(self, message: bytes) -> None:
        """A greeting, or the end."""
        connection, self._connection = self._connection, None
        assert connection is not None
        shown = read_greeting(message)
        if shown is None:
            connection.abort("not a caller")
        elif not (roles := self._credentials.roles_of(shown[1])):
            _refuse(connection, grpc.StatusCode.UNAUTHENTICATED, WRONG_SECRET)
        elif reason := why_refused("a caller", common_pb2.Wire(number=shown[0])):
            _refuse(connection, grpc.StatusCode.FAILED_PRECONDITION, reason)
        else:
            connection.send(_verdict(grpc.StatusCode.OK))
            if self._credentials.asks_for_certificates:
                roles &= roles_of_peer(connection.certificate)
            connection.hand_over(*self._welcome(connection, roles))
        self._end()

    def writable(self) -> None:
        """See `ConnectionOwner`."""

    def lost(self, reason: str) -> None:
        """It went away."""
        self._connection = None
        self._end()

    def cut_off(self) -> None:
        """End the connection, unless it is a caller's by now."""
        if self._sock is not None:
            self._sock.close()
        if self._connection is not None:
            self._connection.abort("no greeting")

    def _end(self) -> None:
        if not self.is_over.done():
            self.is_over.set_result(None)


def _verdict(code: grpc.StatusCode, details: str = "") -> bytes:
    """The message on the whole connection."""
    answer = calls_pb2.CarriedAnswer(status_code=code.value[0], details=details)
    return calls_pb2.AnswerBatch(answers=[answer]).SerializeToString()


def _refuse(connection: CallConnection, code: grpc.StatusCode, details: str) -> None:
    connection.send(_verdict(code, details))
    connection.end(details)
