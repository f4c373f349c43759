"""The loopback ``Transport``: joins regions, incoming and outgoing connections, and post states."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kv_transfer.transport import (
    MemoryRegion,
    PeerHandle,
    RegionWrite,
    TransferHandle,
    TransferState,
)
from kv_transfer.transports.events import EventHub
from kv_transfer.transports.hello import Hello, Status, receive_reply, send_hello
from kv_transfer.transports.loopback.endpoint import LoopbackEndpoint
from kv_transfer.transports.loopback.incoming import IncomingConnections
from kv_transfer.transports.loopback.outgoing import OutgoingConnection, OutgoingPost
from kv_transfer.transports.loopback.regions import RegionTable
from kv_transfer.transports.loopback.wire import PostHeader, WriteHeader, check_post
from kv_transfer.transports.post_table import PostTable
from kv_transfer.transports.sockets import open_connection
from kv_transfer.transports.tls import TlsContexts
from runtime.errors import PeerLostError, StaleTicketError, TandemError, TransferFailedError


class LoopbackTransport:
    """See ``kv_transfer.transport.Transport``, whose promises this keeps with TCP sockets and
    threads.

    ``fence`` is as strong as the interface asks: the receiving thread is joined, and the peer's old
    endpoint is void.
    """

    def __init__(
        self,
        local_name: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: TlsContexts | None = None,
    ) -> None:
        self._local_name = local_name
        self._host = host
        self._client_tls = tls.client if tls else None
        self._lock = threading.Lock()
        self._regions = RegionTable()
        self._posts = PostTable()
        self._events = EventHub()
        self._outgoing: dict[int, OutgoingConnection] = {}  # by connection id
        self._next_connection_id = 1
        self._is_closed = False
        self._incoming = IncomingConnections(
            local_name,
            host,
            self._regions,
            on_notify=self._events.notified,
            port=port,
            tls=tls.server if tls else None,
        )

    @property
    def local_name(self) -> str:
        """Our name among peers."""
        return self._local_name

    @property
    def poll_interval_s(self) -> float | None:
        """None: listeners are told."""
        return None

    @property
    def fence_generation(self) -> int:
        """Number of fences so far."""
        return self._incoming.generation

    @property
    def registered_bytes(self) -> int:
        """Bytes of all regions."""
        return self._regions.num_bytes

    def register(self, region: MemoryRegion) -> None:
        """Make ``region`` writable for peers that get an endpoint from now on."""
        self._regions.add(region)

    def deregister(self, label: str) -> None:
        """Forget a region. Ends incoming connections, because one may be in the middle of a write
        to it.
        """
        self._regions.remove(label)
        self._incoming.end_all()

    def endpoint(self, peer: str) -> bytes:
        """Address, present generation, the peer's token, region keys."""
        generation, token = self._incoming.token(peer)
        port = self._incoming.address[1]
        regions = self._regions.remote_regions()
        return LoopbackEndpoint(
            self._local_name, self._host, port, generation, token, regions
        ).encode()

    def connect(self, peer: str, endpoint: bytes) -> PeerHandle:
        """Open a TCP connection and shake hands; at most about ten seconds."""
        target = LoopbackEndpoint.decode(endpoint)
        if target.name != peer:
            raise StaleTicketError(f"the endpoint is of {target.name}, not of {peer}")
        sock = open_connection(target.host, target.port, self._client_tls)
        try:
            send_hello(sock, Hello(target.generation, target.token, self._local_name, peer))
            status, message = receive_reply(sock)
            sock.settimeout(None)
        except (OSError, ValueError) as error:
            sock.close()
            raise PeerLostError(f"{peer} does not shake hands: {error}") from error
        if status is not Status.OK:
            sock.close()
            raise StaleTicketError(f"{peer} refused the connection: {message}")
        with self._lock:
            if self._is_closed:
                sock.close()
                raise PeerLostError("the transport is closed")
            handle = PeerHandle(peer, self._next_connection_id)
            self._next_connection_id += 1
            self._outgoing[handle.connection_id] = OutgoingConnection(
                sock, handle, self._posts, regions=target.regions, on_event=self._events.tell
            )
        return handle

    def post(
        self, peer: PeerHandle, writes: Sequence[RegionWrite], notify: bytes | None = None
    ) -> TransferHandle:
        """Enqueue the writes for the connection's send thread."""
        check_post(len(writes), notify)
        payload = [self._regions.source(write) for write in writes]
        num_bytes = sum(write.nbytes for write in writes)
        handle = TransferHandle(peer, self._posts.start(), num_bytes)
        connection = self._outgoing.get(peer.connection_id)
        error: TandemError
        if connection is None:
            error = PeerLostError(f"connection to {peer.peer} is closed")
            self._posts.settle(handle.post_id, error)
            return handle
        remote = connection.regions
        unknown = sorted({w.label for w in writes} - remote.keys())
        if unknown:
            error = TransferFailedError(f"{peer.peer} has no region {unknown[0]!r}")
            self._posts.settle(handle.post_id, error)
            return handle
        headers = [WriteHeader(remote[w.label].key, w.dst_offset, w.nbytes) for w in writes]
        connection.post(OutgoingPost(PostHeader(handle.post_id, headers, notify), payload))
        return handle

    def poll(self, handle: TransferHandle) -> TransferState:
        """The state now."""
        return self._posts.state(handle.post_id)

    def error(self, handle: TransferHandle) -> TandemError | None:
        """Why it FAILED."""
        return self._posts.error(handle.post_id)

    def release(self, handle: TransferHandle) -> None:
        """Forget a post whose state is final."""
        self._posts.release(handle.post_id)

    def is_connected(self, peer: PeerHandle) -> bool:
        """Whether the socket was alive when last used."""
        connection = self._outgoing.get(peer.connection_id)
        return connection is not None and connection.is_alive

    def disconnect(self, peer: PeerHandle) -> None:
        """Close a connection and join its threads. Idempotent."""
        with self._lock:
            connection = self._outgoing.pop(peer.connection_id, None)
        if connection is not None:
            connection.close()

    def fence(self, peer: str) -> None:
        """End the peer's connections, join their threads, make its endpoint void."""
        self._incoming.fence(peer)

    def notifications(self) -> list[tuple[str, bytes]]:
        """What arrived since the last call."""
        return self._events.take_notifications()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each completion, loss or notification."""
        self._events.add_listener(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Stop calling ``listener``."""
        self._events.remove_listener(listener)

    def close(self) -> None:
        """Close everything and join all threads. Idempotent."""
        with self._lock:
            self._is_closed = True
            handles = [connection.handle for connection in self._outgoing.values()]
        for handle in handles:
            self.disconnect(handle)
        self._incoming.close()
