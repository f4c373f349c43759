"""TCP ports of this machine: one that is free, or whether a given one is."""

from __future__ import annotations

import socket

from runtime.errors import ConfigError


def free_port(host: str, field: str = "cluster.host") -> int:
    """A TCP port of ``host``, the value of ``field``, that the system gives to nobody else.

    One minute long (the TIME_WAIT of a connection that was closed on its side): whoever binds it
    by number meanwhile gets it, provided that it sets SO_REUSEADDR, as servers do.

    Raises:
        ConfigError: ``host`` is no address of this machine.
    """
    try:
        with listen_at(host, 0) as listener:
            address = listener.getsockname()
            with socket.create_connection(address[:2]) as client:
                listener.accept()[0].close()
                client.recv(1)  # the end: from here on TIME_WAIT is the port's, not the client's
            return int(address[1])
    except OSError as error:
        problem = f"is no address of this machine ({error.strerror})"
        raise ConfigError(field, host, problem, '"127.0.0.1", or another') from error


def listen_at(host: str, port: int) -> socket.socket:
    """A socket that listens there; 0 is any port.

    Raises:
        OSError: the port is taken, or ``host`` is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of a former run in TIME_WAIT do not make a port taken.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener
