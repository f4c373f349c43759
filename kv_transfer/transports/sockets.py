"""Sockets as our own transports want them: large buffers, no delay, and a dead machine noticed
in seconds.
"""

from __future__ import annotations

import socket

from runtime.errors import PeerLostError

_BUFFER_BYTES = 4 << 20
_CONNECT_TIMEOUT_S = 5.0
_SILENT_PEER_MS = 10_000  # data that nobody takes for so long ends the connection
_BACKLOG = 128


def tune(sock: socket.socket) -> None:
    """Options of a connected socket."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_PEER_MS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def open_listener(host: str) -> socket.socket:
    """A listening socket on ``host``, at a port of the kernel's choice."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # Before listen, so that accepted sockets inherit it and scale their window to it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    listener.bind((host, 0))
    listener.listen(_BACKLOG)
    return listener


def open_connection(host: str, port: int) -> socket.socket:
    """A connected socket with a timeout still set.

    Raises:
        PeerLostError: nobody answers.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(_CONNECT_TIMEOUT_S)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        sock.connect((host, port))
        tune(sock)
    except OSError as error:
        sock.close()
        raise PeerLostError(f"no connection to {host}:{port}: {error}") from error
    return sock
