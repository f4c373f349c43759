"""The body of a streamed answer, once its headers are gone: bytes for the connection itself.

A token is some bytes for one socket, so they are framed here and given to the transport, without a
coroutine to wake for each of them: the way through aiohttp's response and writer costs as much as
all else that a token needs before its system call.

The client's pace is the transport's word: it says when more waits than its limit (64 KiB), and when
most of that was taken. In between nothing is written; whoever fills the outlet keeps it until then.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from aiohttp.http import HttpVersion11

from router.http.wire.connections import Connection


class Outlet:
    """Of one answer. Close it before aiohttp writes the end of the answer."""

    __slots__ = ("_is_closed", "call_soon", "connection")

    def __init__(self, request: web.Request) -> None:
        """The answer to ``request`` has no length, and its headers are sent."""
        connection = request.protocol
        assert isinstance(connection, Connection)
        self.connection = connection
        connection.is_chunked = request.version >= HttpVersion11
        self.call_soon = connection.outbox.call_soon
        """Calls what fills the outlet, together with others'."""
        self._is_closed = False

    @property
    def has_room(self) -> bool:
        """Whether the client takes what is sent; never again once the outlet is closed.

        The end of an answer may take long to reach a slow client: what a timer wrote behind it
        would be read as the beginning of the connection's next answer.
        """
        return self.connection.has_room and not self._is_closed

    def on_room(self, refill: Callable[[], None]) -> None:
        """Call ``refill`` each time there is room again."""
        self.connection.on_room = refill

    def write(self, data: bytes) -> None:
        """Send ``data``, which is not empty, together with others'.

        A client that is gone gets none of it, and its request is cancelled.
        """
        self.connection.outbox.add(self.connection, data)

    def take_back(self) -> bytes:
        """What was written in this turn and is not sent yet."""
        return self.connection.outbox.take_back(self.connection)

    def close(self) -> None:
        """What comes now is sent elsewhere, but behind what was sent here."""
        self._is_closed = True
        self.connection.on_room = None
        self.connection.outbox.flush()
