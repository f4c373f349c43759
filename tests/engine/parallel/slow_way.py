"""A connection to another rank on which what the other sends comes late."""

import socket
import threading
import time

LATE_S = 0.02


def slow_way(rank: int, host: str, port: int) -> tuple[str, int]:
    """Return where rank 0 is reached by a way that delays what it sends; others directly."""
    if rank != 0:
        return host, port
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_forward, args=(listener, host, port), daemon=True).start()
    name: tuple[str, int] = listener.getsockname()
    return name


def _forward(listener: socket.socket, host: str, port: int) -> None:
    with listener:
        near, _ = listener.accept()
    far = socket.create_connection((host, port))
    for way in (near, far):
        way.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=_copy, args=(near, far, 0.0), daemon=True).start()
    _copy(far, near, LATE_S)


def _copy(source: socket.socket, target: socket.socket, late_s: float) -> None:
    try:
        while data := source.recv(4096):
            time.sleep(late_s)
            target.sendall(data)
    except OSError:
        pass  # the test is over
    finally:
        target.close()
