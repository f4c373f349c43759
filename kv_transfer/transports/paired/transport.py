"""The paired ``Transport``: connections, post states, notifications around an ``EngineFactory``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from kv_transfer.transport import (
    KV_REGION,
    MemoryRegion,
    PeerHandle,
    RegionWrite,
    TransferHandle,
    TransferState,
)
from kv_transfer.transports.events import EventHub
from kv_transfer.transports.hello import Hello, Status, receive_reply, send_hello
from kv_transfer.transports.loopback.wire import check_post
from kv_transfer.transports.paired.endpoint import PairedEndpoint
from kv_transfer.transports.paired.engine import (
    EngineError,
    EngineFactory,
    EngineWrite,
    WriteEngine,
)
from kv_transfer.transports.paired.frames import FrameKind, Offer, receive_frame, send_frame
from kv_transfer.transports.paired.identity import ProcessIdentity
from kv_transfer.transports.paired.incoming import IncomingPeers
from kv_transfer.transports.paired.outgoing import OutgoingPeer, QueuedPost, wait_for_post
from kv_transfer.transports.paired.regions import RegionBook
from kv_transfer.transports.post_table import PostTable
from kv_transfer.transports.sockets import ByteSocket, open_connection
from kv_transfer.transports.tls import TlsContexts
from runtime.errors import PeerLostError, StaleTicketError, TandemError, TransferFailedError

_OFFER_TIMEOUT_S = 15.0
_WARM_UP_TIMEOUT_S = 5.0
_WARM_UP_BYTES = 1 << 16


class PairedTransport:
    """See ``kv_transfer.transport.Transport``, whose promises this keeps with two instances of a
    library per connection, one at each end, and a control socket between them.

    ``fence`` is what ``transports.paired.incoming`` says.
    """

    def __init__(
        self,
        factory: EngineFactory,
        local_name: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        fence_timeout_s: float = 5.0,
        tls: TlsContexts | None = None,
    ) -> None:
        self._factory = factory
        self._local_name = local_name
        self._host = host
        self._client_tls = tls.client if tls else None
        self._lock = threading.Lock()
        self._regions = RegionBook()
        self._posts = PostTable()
        self._events = EventHub()
        self._outgoing: dict[int, OutgoingPeer] = {}  # by connection id
        self._next_connection_id = 1
        self._is_closed = False
        self._incoming = IncomingPeers(
            local_name,
            host,
            factory,
            self._regions,
            on_notify=self._events.notified,
            fence_timeout_s=fence_timeout_s,
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
        """Bytes of all regions, each counted once however many connections have it."""
        return sum(region.nbytes for region in self._regions.all())

    def register(self, region: MemoryRegion) -> None:
        """Make ``region`` writable for connections that are made from now on, and readable for all
        posts.
        """
        self._regions.add(region)
        for connection in self._connections():
            connection.register(region)

    def deregister(self, label: str) -> None:
        """Forget a region. Ends incoming connections, because one may be in the middle of a write
        to it.
        """
        region = self._regions.remove(label)
        for connection in self._connections():
            connection.deregister(region)
        self._incoming.end_all()

    def endpoint(self, peer: str) -> bytes:
        """Address, present generation and the peer's token."""
        generation, token = self._incoming.token(peer)
        return PairedEndpoint(
            library=self._factory.library,
            name=self._local_name,
            host=self._host,
            port=self._incoming.port,
            generation=generation,
            token=token.hex(),
        ).encode()

    def connect(self, peer: str, endpoint: bytes) -> PeerHandle:
        """Say hello, take the offer, attach an instance of the library, write once to warm up."""
        target = PairedEndpoint.decode(endpoint)
        if target.name != peer:
            raise StaleTicketError(f"the endpoint is of {target.name}, not of {peer}")
        if target.library != self._factory.library:
            raise TransferFailedError(
                f"{peer} speaks {target.library!r}, we speak {self._factory.library!r}. "
                "Fix: the same [kv_transfer] on both workers"
            )
        sock = open_connection(target.host, target.port, self._client_tls)
        try:
            sock.settimeout(_OFFER_TIMEOUT_S)
            offer = _shake_hands(sock, self._local_name, target)
            sock.settimeout(None)
        except (OSError, ValueError) as error:
            _say_bye(sock)  # we never had the memory that the peer may have offered
            raise PeerLostError(f"{peer} does not shake hands: {error}") from error
        except TandemError:
            _say_bye(sock)
            raise
        return self._open(sock, peer, offer)

    def post(
        self, peer: PeerHandle, writes: Sequence[RegionWrite], notify: bytes | None = None
    ) -> TransferHandle:
        """Enqueue the writes for the connection's drive thread."""
        check_post(len(writes), notify)
        sources = [self._regions.source_of(write).device for write in writes]
        num_bytes = sum(write.nbytes for write in writes)
        handle = TransferHandle(peer, self._posts.start(), num_bytes)
        connection = self._outgoing.get(peer.connection_id)
        error: TandemError
        if connection is None:
            error = PeerLostError(f"connection to {peer.peer} is closed")
            self._posts.settle(handle.post_id, error)
            return handle
        targets = []
        for write, device in zip(writes, sources, strict=True):
            remote = connection.regions.get(write.label)
            end = write.dst_offset + write.nbytes
            if remote is None or write.dst_offset < 0 or end > remote.nbytes:
                error = TransferFailedError(
                    f"{peer.peer} has no bytes [{write.dst_offset}, {end}) in a region "
                    f"{write.label!r}"
                )
                self._posts.settle(handle.post_id, error)
                return handle
            address = remote.address + write.dst_offset
            targets.append(
                EngineWrite(write.src_address, address, write.nbytes, device, remote.device)
            )
        connection.post(QueuedPost(handle.post_id, targets, notify))
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
        """Whether library and control socket were alive when last used."""
        connection = self._outgoing.get(peer.connection_id)
        return connection is not None and connection.is_alive

    def disconnect(self, peer: PeerHandle) -> None:
        """Destroy our end of a connection and join its threads. Idempotent."""
        with self._lock:
            connection = self._outgoing.pop(peer.connection_id, None)
        if connection is not None:
            connection.close()

    def fence(self, peer: str) -> None:
        """Make the peer's endpoint void, end its connections, be sure of it.

        Raises:
            TransferFailedError: the peer, a process of our host, may still write.
        """
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

    def _connections(self) -> tuple[OutgoingPeer, ...]:
        with self._lock:
            return tuple(self._outgoing.values())

    def _open(self, sock: ByteSocket, peer: str, offer: Offer) -> PeerHandle:
        with self._lock:
            handle = PeerHandle(peer, self._next_connection_id)
            self._next_connection_id += 1
        engine: WriteEngine | None = None
        try:
            engine = self._factory.create(f"{self._local_name}>{handle.connection_id}")
            for region in self._regions.all():
                engine.register(region)
            engine.attach(offer.address)
            _warm_up(engine, self._regions.all(), offer)
        except EngineError as error:
            if engine is not None:
                engine.close()
            _say_bye(sock)
            raise PeerLostError(f"no connection to {peer}: {error}") from error
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._outgoing[handle.connection_id] = OutgoingPeer(
                    sock,
                    handle,
                    engine,
                    self._posts,
                    regions={region.label: region for region in offer.regions},
                    on_event=self._events.tell,
                )
        if is_closed:
            engine.close()
            _say_bye(sock)
            raise PeerLostError("the transport is closed")
        return handle


def _shake_hands(sock: ByteSocket, local_name: str, target: PairedEndpoint) -> Offer:
    token = bytes.fromhex(target.token)
    send_hello(sock, Hello(target.generation, token, local_name, target.name))
    status, message = receive_reply(sock)
    if status is not Status.OK:
        raise StaleTicketError(f"{target.name} refused the connection: {message}")
    send_frame(sock, FrameKind.WHO, ProcessIdentity.of_this_process().encode())
    kind, payload = receive_frame(sock)
    if kind is FrameKind.OFFER:
        return Offer.decode(payload)
    raise PeerLostError(
        f"{target.name} cannot serve the connection: {payload.decode(errors='replace')}"
    )


def _warm_up(engine: WriteEngine, ours: Sequence[MemoryRegion], offer: Offer) -> None:
    """The first write opens handles and connections, which takes milliseconds: have it now."""
    source = next((region for region in ours if region.label == KV_REGION), None)
    for remote in offer.regions:
        if source is None or not remote.scratch_bytes:
            continue
        nbytes = min(_WARM_UP_BYTES, remote.scratch_bytes, source.nbytes)
        write = EngineWrite(source.address, remote.address, nbytes, source.device, remote.device)
        wait_for_post(engine, engine.start([write]), _WARM_UP_TIMEOUT_S)


def _say_bye(sock: ByteSocket) -> None:
    with contextlib.suppress(OSError):  # the peer is gone
        send_frame(sock, FrameKind.BYE)
    sock.close()
