"""Connections that peers opened to write here: admission, one instance of the library each, the
fence.

A fence destroys the peer's instance at our end. That stops every writer that needs us or a network
card. A process of our own host may write without either; it is told to destroy its end, and the
fence waits for its word (BYE) or its end. Without one of the two a fence fails: better blocks that
stay in quarantine than blocks that two requests share.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable

from kv_transfer.transports.gate import Gate, reason_too_many
from kv_transfer.transports.hello import Hello, Status, send_reply
from kv_transfer.transports.listener import Listener
from kv_transfer.transports.paired.engine import EngineError, EngineFactory
from kv_transfer.transports.paired.frames import FrameKind, receive_frame
from kv_transfer.transports.paired.identity import ProcessIdentity
from kv_transfer.transports.paired.incoming_peer import IncomingPeer
from kv_transfer.transports.paired.regions import RegionBook
from kv_transfer.transports.sockets import ByteSocket
from runtime.errors import TransferFailedError
from runtime.logging import get_logger

_OFFER_TIMEOUT_S = 5.0
_GONE_POLL_S = 0.005

_log = get_logger(__name__)


class IncomingPeers:
    """The listening socket and all connections to it. Thread-safe.

    ``on_notify(peer, message)`` is called from a thread of that peer's connection.
    """

    def __init__(
        self,
        name: str,
        host: str,
        factory: EngineFactory,
        regions: RegionBook,
        *,
        on_notify: Callable[[str, bytes], None],
        fence_timeout_s: float,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._name = name
        self._gate = Gate(name)
        self._factory = factory
        self._regions = regions
        self._on_notify = on_notify
        self._fence_timeout_s = fence_timeout_s
        self._us = ProcessIdentity.of_this_process()
        self._lock = threading.Lock()
        self._peers: set[IncomingPeer] = set()
        self._suspects: dict[str, list[ProcessIdentity]] = {}  # by peer: may still write
        self._num_created = 0
        self._is_closing = False
        self._listener = Listener(
            host, name="kv-paired-accept", welcome=self._let_in, port=port, tls=tls
        )
        self.port: int = self._listener.address[1]

    @property
    def generation(self) -> int:
        """Number of fences so far."""
        return self._gate.generation

    def token(self, peer: str) -> tuple[int, bytes]:
        """The present generation, and the token of ``peer`` in it."""
        return self._gate.token(peer)

    def fence(self, peer: str) -> None:
        """Shut out ``peer``; its next connection needs an endpoint of a later generation.

        Raises:
            TransferFailedError: it lives on our host, could write behind our back, and does not
                answer. Its connection is void all the same; call again.
        """
        with self._lock:
            self._gate.shut_out(peer)
            victims = [connection for connection in self._peers if connection.name == peer]
        stubborn = [victim.who for victim in self._end(victims) if victim.who is not None]
        deadline = time.monotonic() + self._fence_timeout_s
        while suspects := stubborn + self._suspects_of(peer):
            if stubborn or time.monotonic() > deadline:
                raise TransferFailedError(
                    f"{peer} (process {suspects[0].pid} of this host) does not confirm its fence "
                    "and is alive: it could still write. Fix: end that process"
                )
            time.sleep(_GONE_POLL_S)

    def end_all(self) -> None:
        """End all connections; their peers may connect again.

        Raises:
            TransferFailedError: as for ``fence``.
        """
        with self._lock:
            victims = list(self._peers)
        if stubborn := self._end(victims):
            raise TransferFailedError(f"{stubborn[0].name} does not stop and could still write")

    def close(self) -> None:
        """Stop listening, end all connections, join all threads. Idempotent."""
        with self._lock:
            self._is_closing = True
        self._listener.close()
        with self._lock:
            victims = list(self._peers)
        for connection in self._end(victims):
            connection.cut()

    def _end(self, victims: list[IncomingPeer]) -> list[IncomingPeer]:
        """Tell them to stop, wait, destroy our ends. Those that could write all the same are
        returned; their sockets stay open for their BYE.
        """
        for connection in victims:
            connection.ask_to_stop()
        deadline = time.monotonic() + self._fence_timeout_s
        stubborn = []
        for connection in victims:
            if connection.is_over.wait(max(0.0, deadline - time.monotonic())):
                continue
            connection.close_engine()
            if self._may_still_write(connection):
                stubborn.append(connection)
            else:
                connection.cut()
        return stubborn

    def _may_still_write(self, connection: IncomingPeer) -> bool:
        return (
            self._factory.bypasses_receiver
            and connection.who is not None
            and connection.may_still_write(self._us)
            and not connection.who.is_gone(self._us)
        )

    def _suspects_of(self, peer: str) -> list[ProcessIdentity]:
        with self._lock:
            self._forget_gone()
            return self._suspects.get(peer, [])

    def _forget_gone(self) -> None:
        for peer, suspects in list(self._suspects.items()):
            self._suspects[peer] = [who for who in suspects if not who.is_gone(self._us)]
            if not self._suspects[peer]:
                del self._suspects[peer]

    # --- One thread a connection.

    def _let_in(self, sock: ByteSocket, hello: Hello) -> str:
        connection = IncomingPeer(sock, hello.sender, self._on_notify)
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="kv-paired-in", daemon=True
        )
        with self._lock:
            reason = self._reason_to_refuse(hello)
            if not reason:
                thread.start()
                self._peers.add(connection)
        return reason

    def _reason_to_refuse(self, hello: Hello) -> str:
        if self._is_closing:
            return "the transport is closing"
        peers = [connection.name for connection in self._peers]
        return self._gate.reason_to_refuse(hello) or reason_too_many(peers, hello.sender)

    def _serve(self, connection: IncomingPeer) -> None:
        try:
            connection.sock.settimeout(_OFFER_TIMEOUT_S)
            send_reply(connection.sock, Status.OK)
            self._make_offer(connection)
            connection.sock.settimeout(None)
            connection.read_frames()
        except (OSError, EngineError) as error:
            _log.debug("connection of %s ends: %s", connection.name, error)
        finally:
            self._forget(connection)

    def _make_offer(self, connection: IncomingPeer) -> None:
        kind, payload = receive_frame(connection.sock)
        if kind is not FrameKind.WHO:
            raise OSError(f"a {kind.name} frame instead of WHO")
        connection.who = ProcessIdentity.decode(payload)
        with self._lock:
            self._num_created += 1
            number = self._num_created
        try:
            engine = self._factory.create(f"{self._name}<{number}")
            offer = connection.open(engine, self._factory.library, self._regions.all())
        except EngineError as error:
            connection.send(FrameKind.ERROR, str(error).encode())
            raise
        connection.was_offered = True
        try:
            connection.send(FrameKind.OFFER, offer.encode())
        except OSError:
            connection.was_offered = False  # cut short: nobody can read it
            raise

    def _forget(self, connection: IncomingPeer) -> None:
        connection.close_engine()
        connection.sock.close()
        with self._lock:
            self._peers.discard(connection)
            if connection.who is not None and self._may_still_write(connection):
                self._forget_gone()
                suspects = self._suspects.setdefault(connection.name, [])
                if connection.who not in suspects:
                    suspects.append(connection.who)
        connection.is_over.set()
