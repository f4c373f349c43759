"""Connections that peers opened to write into our memory, and the fence that ends them.

Each has, from its hello on, a thread that reads payloads straight into the registered regions (see
``transports.listener`` for those before it). A fence shuts the socket
down and joins that thread: a write that it had begun may end short, and nothing follows. What the
kernel still held for the socket goes with it, and the peer's pending posts FAIL.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.transports.gate import Gate, reason_too_many
from kv_transfer.transports.hello import Hello, Status, WireError, receive_into, send_reply
from kv_transfer.transports.listener import Listener
from kv_transfer.transports.loopback.regions import RegionTable
from kv_transfer.transports.loopback.wire import PostHeader, receive_post, send_ack
from kv_transfer.transports.sockets import ByteSocket
from runtime.logging import get_logger

_REPLY_TIMEOUT_S = 5.0
_SCRATCH_BYTES = 1 << 20

_log = get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Connection:
    sock: ByteSocket
    peer: str
    thread: threading.Thread | None = None
    is_fenced: bool = False


class IncomingConnections:
    """The listening socket and all connections to it. Thread-safe.

    ``on_notify(peer, message)`` is called when a post with a notification is complete, from that
    peer's thread.
    """

    def __init__(
        self,
        name: str,
        host: str,
        regions: RegionTable,
        *,
        on_notify: Callable[[str, bytes], None],
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._gate = Gate(name)
        self._regions = regions
        self._on_notify = on_notify
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._is_closing = False
        self._listener = Listener(
            host, name="kv-loopback-accept", welcome=self._let_in, port=port, tls=tls
        )
        self.address = self._listener.address

    @property
    def generation(self) -> int:
        """Number of fences so far."""
        return self._gate.generation

    def token(self, peer: str) -> tuple[int, bytes]:
        """The present generation, and the token of ``peer`` in it."""
        return self._gate.token(peer)

    def fence(self, peer: str) -> None:
        """End all connections of ``peer``; its next one needs an endpoint of a later generation."""
        with self._lock:
            self._gate.shut_out(peer)
            victims = [c for c in self._connections if c.peer == peer]
        self._end(victims)

    def end_all(self) -> None:
        """End all connections; their peers may connect again."""
        with self._lock:
            victims = list(self._connections)
        self._end(victims)

    def close(self) -> None:
        """Stop listening, end all connections, join all threads. Idempotent."""
        with self._lock:
            self._is_closing = True
        self._listener.close()
        self.end_all()

    def _end(self, victims: list[_Connection]) -> None:
        for connection in victims:
            connection.is_fenced = True
            _shut_down(connection.sock)
        for connection in victims:
            assert connection.thread is not threading.current_thread(), "fence inside a listener"
            if connection.thread is not None:
                connection.thread.join()

    def _let_in(self, sock: ByteSocket, hello: Hello) -> str:
        connection = _Connection(sock, hello.sender)
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="kv-loopback-in", daemon=True
        )
        with self._lock:
            reason = self._reason_to_refuse(hello)
            if not reason:
                connection.thread = thread
                thread.start()
                self._connections.add(connection)
        return reason

    def _reason_to_refuse(self, hello: Hello) -> str:
        if self._is_closing:
            return "the transport is closing"
        peers = [connection.peer for connection in self._connections]
        return self._gate.reason_to_refuse(hello) or reason_too_many(peers, hello.sender)

    def _serve(self, connection: _Connection) -> None:
        sock = connection.sock
        try:
            sock.settimeout(_REPLY_TIMEOUT_S)
            send_reply(sock, Status.OK)
            sock.settimeout(None)
            self._read_posts(connection)
        except OSError as error:
            _log.debug("connection of %s ends: %s", connection.peer, error)
        finally:
            sock.close()
            with self._lock:
                self._connections.discard(connection)

    def _read_posts(self, connection: _Connection) -> None:
        while True:
            post = receive_post(connection.sock)
            targets = self._regions.targets(post.writes)
            if isinstance(targets, str):
                _log.warning("refused a post of %s: %s", connection.peer, targets)
                _discard(connection.sock, sum(write.nbytes for write in post.writes))
                send_ack(connection.sock, post.post_id, Status.REFUSED, targets)
                continue
            self._land(connection, post, targets)

    def _land(self, connection: _Connection, post: PostHeader, targets: list[memoryview]) -> None:
        for view in targets:
            if connection.is_fenced:
                raise WireError("fenced")
            receive_into(connection.sock, view)
        if post.notify is not None:
            self._on_notify(connection.peer, post.notify)
        send_ack(connection.sock, post.post_id, Status.OK)


def _shut_down(sock: ByteSocket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # closed already, by the peer or by its own thread


def _discard(sock: ByteSocket, nbytes: int) -> None:
    """Read past the payload of a refused post, so that the connection stays usable for the
    others.
    """
    scratch = memoryview(bytearray(min(nbytes, _SCRATCH_BYTES)))
    while nbytes > 0:
        receive_into(sock, scratch[: min(nbytes, _SCRATCH_BYTES)])
        nbytes -= min(nbytes, _SCRATCH_BYTES)
