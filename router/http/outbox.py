"""What streams have to send in one turn of the event loop, for all connections of a process.

Written together: system calls in a row cost less than each of them among the work for its bytes.
"""

from __future__ import annotations

import asyncio

from aiohttp.web import RequestHandler


class Outbox:
    """Bytes for connections, in order. One event loop owns it."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[tuple[RequestHandler, bytes]] = []

    def add(self, connection: RequestHandler, data: bytes) -> None:
        """Write ``data`` in the next turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append((connection, data))

    def flush(self) -> None:
        """Write all now; what is for closed connections is dropped."""
        waiting, self._waiting = self._waiting, []
        for connection, data in waiting:
            transport = connection.transport
            if transport is not None and not transport.is_closing():
                transport.write(data)
