"""The answer to a request that was understood: status 200 and a body, whole or as a stream.

It is one of aiohttp's answers for whoever holds it, and writes by itself: its head is text made in
one go, and leaves in one system call with what comes first. aiohttp makes a head from tables and
hands it through five calls, which cost a short request as much as reading its body.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11

from router.http.wire.connections import Connection

_LAST_CHUNK = b"0\r\n\r\n"


class Reply(web.StreamResponse):
    """Of one request."""

    def __init__(self, headers: Mapping[str, str], body: bytes | None = None) -> None:
        """``body`` None: what is written, until its end."""
        super().__init__(headers=headers)
        self._whole = body
        self._request: web.BaseRequest | None = None
        self._connection: Connection | None = None
        self._head = b""
        """Made and not sent yet."""
        self._is_chunked = self._keeps_alive = self._has_ended = False

    @property
    def prepared(self) -> bool:
        """Whether its head is made."""
        return self._connection is not None

    @property
    def keep_alive(self) -> bool:
        """Whether the connection is good for another request."""
        return self._keeps_alive

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Make the head; it is sent with what is written first."""
        if self._connection is not None:
            return None
        if isinstance(request, web.Request):
            for told in request.app.on_response_prepare:
                await told(request, self)
        connection = request.protocol
        assert isinstance(connection, Connection)
        is_new = request.version >= HttpVersion11
        self._is_chunked = is_new and self._whole is None
        # Without a length and without chunks it is the connection's end that ends the body.
        self._keeps_alive = request.keep_alive and (is_new or self._whole is not None)
        self._head = self._head_for(is_new)
        self._request, self._connection = request, connection
        return None

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send ``data`` of a stream, and the head if it is not sent, even where that is all."""
        self._send(self._framed(data) if data else b"")

    async def write_eof(self, data: bytes = b"") -> None:
        """Send all that is left, and return once the client has taken most of it."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._whole is not None:
            self._send(self._whole)
        elif self._is_chunked:
            self._send((self._framed(data) if data else b"") + _LAST_CHUNK)
        else:
            self._send(data)
        assert self._connection is not None
        await self._connection.room()

    def _head_for(self, is_new: bool) -> bytes:
        lines = [f"HTTP/1.{int(is_new)} 200 OK"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines += [f"{hdrs.DATE}: {_date(int(time.time()))}", f"{hdrs.SERVER}: {SERVER_SOFTWARE}"]
        if self._whole is not None:
            lines.append(f"{hdrs.CONTENT_LENGTH}: {len(self._whole)}")
        elif self._is_chunked:
            lines.append(f"{hdrs.TRANSFER_ENCODING}: chunked")
        if is_new != self._keeps_alive:  # what the version does not say by itself
            lines.append(f"{hdrs.CONNECTION}: {'close' if is_new else 'keep-alive'}")
        head = "\r\n".join(lines)
        if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1:
            raise ValueError("a header of an answer has a line break in it")
        return f"{head}\r\n\r\n".encode()

    def _framed(self, data: bytes | bytearray | memoryview) -> bytes:
        data = bytes(data)
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data

    def _send(self, data: bytes) -> None:
        assert self._connection is not None
        assert self._request is not None
        transport = self._connection.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        data, self._head = self._head + data, b""
        self._request.writer.output_size += len(data)  # where aiohttp looks whether it has begun
        if data:
            transport.write(data)


@lru_cache(maxsize=1)
def _date(now: int) -> str:
    """As HTTP writes it."""
    return formatdate(now, usegmt=True)
