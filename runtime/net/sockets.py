"""Our own sockets: no delay, and a dead machine noticed in seconds."""

from __future__ import annotations

import socket

from runtime.errors import ConfigError

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


def open_listener(
    host: str, port: int = 0, *, field: str = "port", receive_bytes: int = 0
) -> socket.socket:
    """A listening socket on ``host``; port 0: one of the kernel's choice.

    ``receive_bytes`` are the buffer of each connection; 0: as the kernel has them.

    Raises:
        ConfigError: something else listens at ``port``, which comes from ``field``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    if receive_bytes:
        # Before listen, so that accepted sockets inherit it and scale their window to it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    if port:
        # Connections of a former life in TIME_WAIT do not make a port taken.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if not port:
            raise
        problem = f"cannot listen on {host} ({error.strerror})"
        raise ConfigError(field, port, problem, "a free port") from error
    listener.listen(_BACKLOG)
    return listener
