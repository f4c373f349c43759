"""TLS for the sockets between transports: the contexts, and a socket that two threads may share.

OpenSSL must not read and write one connection at the same time, and a thread that blocks in a read
must not keep another from writing. So the socket below never blocks: calls into OpenSSL are short
and locked, and whoever has to wait does so in ``poll``.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_MAX_BYTES_AT_ONCE = 1 << 18
"""Of one call into OpenSSL, which holds the lock."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsContexts:
    """What a transport listens and connects with; both ends verify what their context says."""

    server: ssl.SSLContext
    client: ssl.SSLContext


class TlsSocket:
    """A connection whose handshake is over. One thread may read it while another writes.

    Has the methods of a socket that our transports use, with a socket's meaning.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._lock = threading.Lock()
        self._timeout_s: float | None = None

    def settimeout(self, timeout_s: float | None) -> None:
        """Of each call; None is for ever."""
        self._timeout_s = timeout_s

    def recv_into(self, view: memoryview | bytearray, nbytes: int = 0, flags: int = 0) -> int:
        """Read at least a byte, at most ``view``; 0 at the end. ``flags`` are without meaning."""
        return self._run(lambda: self._sock.recv_into(view, nbytes))

    def sendmsg(self, buffers: Sequence[memoryview | bytes]) -> int:
        """Send some of the first of ``buffers``."""
        piece = memoryview(buffers[0])[:_MAX_BYTES_AT_ONCE]
        return self._run(lambda: self._sock.send(piece))

    def sendall(self, data: bytes) -> None:
        """Send all of ``data``."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.sendmsg([rest]) :]

    def shutdown(self, how: int) -> None:
        """End the connection under both threads."""
        # Not SSLSocket's: it would let a reader have what is left undecrypted.
        socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        """Close the descriptor; nobody may wait on it any more."""
        self._sock.close()

    def _run(self, call: Callable[[], _T]) -> _T:
        until = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while True:
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            self._wait(event, until)

    def _wait(self, event: int, until: float | None) -> None:
        poll = select.poll()
        poll.register(self._sock, event)
        left_ms = None if until is None else max(0.0, until - time.monotonic()) * 1000
        if not poll.poll(left_ms):
            raise TimeoutError("timed out")
