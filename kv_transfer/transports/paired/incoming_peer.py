"""One connection that a peer opened to write here, with our end's instance of the library."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

from kv_transfer.transport import MemoryRegion
from kv_transfer.transports.paired.engine import EngineError, WriteEngine
from kv_transfer.transports.paired.frames import FrameKind, Offer, receive_frame, send_frame
from kv_transfer.transports.paired.identity import ProcessIdentity
from kv_transfer.transports.sockets import ByteSocket


class IncomingPeer:
    """State of one connection. Its thread opens and reads; others ``ask_to_stop`` and ``cut``."""

    def __init__(
        self, sock: ByteSocket, name: str, on_notify: Callable[[str, bytes], None]
    ) -> None:
        self.sock = sock
        self.name = name
        """The peer's."""
        self.who: ProcessIdentity | None = None
        self.was_offered = False
        """Whether the peer was told how to reach our memory: before that it cannot write."""
        self.is_over = threading.Event()
        self._on_notify = on_notify
        self._engine: WriteEngine | None = None
        self._said_bye = False
        self._is_stopped = False
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Send one frame; any thread may."""
        with self._send_lock:
            send_frame(self.sock, kind, payload)

    def open(self, engine: WriteEngine, library: str, regions: Sequence[MemoryRegion]) -> Offer:
        """Register ``regions`` with ``engine``; the offer for the peer.

        Raises:
            EngineError: the library refuses, or the connection was fenced meanwhile.
        """
        with self._lock:
            if self._is_stopped:
                engine.close()
                raise EngineError("fenced")
            self._engine = engine
            for region in regions:
                engine.register(region)
            return Offer(library, engine.address(), tuple(regions))

    def read_frames(self) -> None:
        """Deliver notifications until the peer says BYE.

        Raises:
            OSError: the connection ended without.
        """
        while True:
            kind, payload = receive_frame(self.sock)
            if kind is FrameKind.BYE:
                self._said_bye = True
                return
            if kind is FrameKind.NOTIFY and not self._is_stopped:
                self._on_notify(self.name, payload)

    def ask_to_stop(self) -> None:
        """Tell the peer to destroy its end. Does not wait."""
        self._is_stopped = True
        try:
            self.send(FrameKind.FENCE)
        except OSError:
            return  # the connection is over already

    def cut(self) -> None:
        """Destroy our end, close the socket, join the connection's thread."""
        self.close_engine()
        with contextlib.suppress(OSError):  # the peer was first
            self.sock.shutdown(socket.SHUT_RDWR)
        self.is_over.wait()

    def close_engine(self) -> None:
        """Destroy our instance of the library. Idempotent."""
        with self._lock:
            self._is_stopped = True
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()

    def may_still_write(self, us: ProcessIdentity) -> bool:
        """Whether the peer runs on our host, had our memory, and did not confirm that it is
        done.
        """
        who = self.who
        if who is None or not self.was_offered or self._said_bye:
            return False
        return who.is_on_host_of(us) and who != us
