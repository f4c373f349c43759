"""What streams have to do and to send in one turn of the event loop, for all of a process.

Taken together: a handle of the loop for each of a few hundred streams costs more than a list, and
system calls in a row cost less than each of them among the work for its bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from runtime.logging import get_logger

logger = get_logger(__name__)


class Connection(Protocol):
    """Whom bytes are for."""

    @property
    def transport(self) -> asyncio.Transport | None:
        """Of its socket; None once that is closed."""

    @property
    def is_chunked(self) -> bool:
        """Whether bytes go as chunks of HTTP/1.1's transfer coding."""


class Outbox:
    """Calls, then bytes for connections, each in order. One event loop owns it."""

    __slots__ = ("_calls", "_is_due", "_waiting")

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []
        self._waiting: dict[Connection, list[bytes]] = {}
        self._is_due = False

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call ``call`` in the next turn, before what it adds is written."""
        self._calls.append(call)
        self._run_soon()

    def add(self, connection: Connection, data: bytes) -> None:
        """Write ``data``, not empty, in this turn where the calls are under way, or in the next.

        All that a connection gets in a turn is one write, and one chunk.
        """
        parts = self._waiting.get(connection)
        if parts is None:
            self._waiting[connection] = [data]
            if not self._is_due:
                self._run_soon()
        else:
            parts.append(data)

    def take_back(self, connection: Connection) -> bytes:
        """What waits for ``connection``: it is written with what the caller has for it."""
        return b"".join(self._waiting.pop(connection, ()))

    def flush(self) -> None:
        """Write all now; what is for closed connections is dropped.

        A connection that cannot be written to is cut off, as its stream has a hole; nobody else's.
        """
        waiting, self._waiting = self._waiting, {}
        for connection, parts in waiting.items():
            transport = connection.transport
            if transport is None or transport.is_closing():
                continue
            data = b"".join(parts)
            if connection.is_chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            try:
                transport.write(data)
            except Exception:
                logger.exception("a connection could not be written to, and is cut off")
                transport.abort()

    def _run_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except Exception:  # of this stream alone
                logger.exception("a stream's news were not understood")
        self.flush()
        self._is_due = False
        if self._calls:
            self._run_soon()
