"""One connection of a sender lane to one peer: being made on a short-lived thread of its own, made,
lost, or being closed on another such thread.

The lane must serve its other peers while one does not answer, so it waits neither for ``connect``
nor for ``disconnect``. A
ticket is bound to its link for life: when the connection is lost, all its tickets fail, and only
tickets opened later (with a permission that decode gave later) use the next link.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kv_transfer.open_ticket import OpenTicket
from kv_transfer.ticket import PeerEndpoint
from kv_transfer.transport import PeerHandle, Transport
from runtime.budget import Budget, earliest
from runtime.errors import InternalError, PeerLostError, TandemError
from runtime.logging import get_logger

_log = get_logger(__name__)


class PeerLink:
    """The tickets of one peer and the connection that they share. Belongs to the lane's thread."""

    def __init__(
        self, transport: Transport, endpoint: PeerEndpoint, *, on_change: Callable[[], None]
    ) -> None:
        self.endpoint = endpoint
        self.tickets: dict[int, OpenTicket] = {}  # by nonce, oldest first
        self.num_posts = 0
        """In flight."""
        self.bytes_in_flight = 0
        self._moved_at = 0.0
        self._transport = transport
        self._on_change = on_change
        self._handle: PeerHandle | None = None
        self._error: TandemError | None = None
        self._is_closed = False
        self._closing: threading.Thread | None = None
        self._connecting = threading.Thread(
            target=self._connect, name=f"kv-connect-{endpoint.peer}", daemon=True
        )
        self._connecting.start()

    @property
    def handle(self) -> PeerHandle | None:
        """The connection, None while it is being made."""
        return self._handle

    @property
    def error(self) -> TandemError | None:
        """Why the link can carry nothing more; None while it is good or being made."""
        if self._error is not None:
            return self._error
        if self._handle is not None and not self._transport.is_connected(self._handle):
            return PeerLostError(f"connection to {self.endpoint.peer} is lost")
        return None

    def posted(self, num_bytes: int, now: float) -> None:
        """A post was started."""
        if self.num_posts == 0:
            self._moved_at = now
        self.num_posts += 1
        self.bytes_in_flight += num_bytes

    def settled(self, num_bytes: int, now: float) -> None:
        """A post is over."""
        self.num_posts -= 1
        self.bytes_in_flight -= num_bytes
        self._moved_at = now

    def limit_of(self, ticket: OpenTicket) -> Budget | None:
        """What ``ticket`` has to keep now: its own limit, and that some post of the peer ends."""
        if not self.num_posts or ticket.is_stopped:
            return ticket.limit
        standstill = ticket.ticket.transfer_time(self._moved_at)
        return standstill if ticket.limit is None else earliest((ticket.limit, standstill))

    @property
    def is_closed(self) -> bool:
        """Nothing of it is left: no connection, no thread that ``close`` would wait for."""
        return self._is_closed

    def begin_close(self) -> None:
        """Carry nothing more, and disconnect on another thread, which wakes the lane when pending
        posts are FAILED. Idempotent.
        """
        if self._closing is not None:
            return
        self._error = self._error or PeerLostError(f"connection to {self.endpoint.peer} is closed")
        self._closing = threading.Thread(
            target=self._disconnect, name=f"kv-close-{self.endpoint.peer}", daemon=True
        )
        self._closing.start()

    def close(self) -> None:
        """The same, and wait for its end."""
        self.begin_close()
        assert self._closing is not None
        self._closing.join()

    def _connect(self) -> None:
        try:
            self._handle = self._transport.connect(self.endpoint.peer, self.endpoint.endpoint)
        except TandemError as error:
            self._error = self._error or error
        except Exception as error:
            self._error = InternalError(f"connect to {self.endpoint.peer}: {error!r}")
        self._on_change()

    def _disconnect(self) -> None:
        self._connecting.join()
        try:
            if self._handle is not None:
                self._transport.disconnect(self._handle)
        except Exception:
            _log.exception("cannot close the connection to %s", self.endpoint.peer)
        self._is_closed = True
        self._on_change()
