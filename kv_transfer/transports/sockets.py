"""Sockets as our own transports want them: those of `runtime.net.sockets` with large buffers."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

from kv_transfer.transports.tls import TlsSocket
from runtime.errors import PeerLostError
from runtime.net import sockets

_BUFFER_BYTES = 4 << 20
_CONNECT_TIMEOUT_S = 5.0


class ByteSocket(Protocol):
    """A connection, with a socket's meaning: a socket, or a ``TlsSocket``."""

    def settimeout(self, timeout_s: float | None, /) -> None:
        """Of each call; None is for ever."""
        ...

    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        """Read at most ``view``; 0 at the end."""
        ...

    def sendmsg(self, buffers: Sequence[memoryview | bytes], /) -> int:
        """Send some of ``buffers``; how many bytes."""
        ...

    def sendall(self, data: bytes, /) -> None:
        """Send all of ``data``."""
        ...

    def shutdown(self, how: int, /) -> None:
        """End the connection under all threads that use it."""
        ...

    def close(self) -> None:
        """Close the descriptor."""
        ...


def open_listener(host: str, port: int = 0) -> socket.socket:
    """A listening socket on ``host``; port 0: one of the kernel's choice.

    Raises:
        ConfigError: something else listens at ``port``.
    """
    return sockets.open_listener(host, port, field="--data-port", receive_bytes=_BUFFER_BYTES)


def open_connection(host: str, port: int, tls: ssl.SSLContext | None = None) -> ByteSocket:
    """A connected socket with a timeout still set; with ``tls`` its handshake is over.

    Raises:
        PeerLostError: nobody answers.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    secure: ssl.SSLSocket | None = None
    try:
        sock.settimeout(_CONNECT_TIMEOUT_S)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        sock.connect((host, port))
        sockets.tune(sock)
        if tls is not None:
            secure = tls.wrap_socket(sock, server_hostname=host)  # all of it in the timeout
    except OSError as error:
        sock.close()
        raise PeerLostError(f"no connection to {host}:{port}: {error}") from error
    if secure is None:
        return sock
    connection = TlsSocket(secure)
    connection.settimeout(_CONNECT_TIMEOUT_S)
    return connection
