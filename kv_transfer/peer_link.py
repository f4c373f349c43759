"""One connection of a sender lane to one peer: being made on a short-lived thread of its own, made,
or lost.

The lane must serve its other peers while one does not answer, so it never waits for ``connect``. A
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


class PeerLink:
    """The tickets of one peer and the connection that they share. Belongs to the lane's thread."""

    def __init__(
        self, transport: Transport, endpoint: PeerEndpoint, *, on_connected: Callable[[], None]
    ) -> None:
        self.endpoint = endpoint
        self.tickets: dict[int, OpenTicket] = {}  # by nonce, oldest first
        self.num_posts = 0
        """In flight."""
        self.bytes_in_flight = 0
        self._moved_at = 0.0
        self._transport = transport
        self._on_connected = on_connected
        self._handle: PeerHandle | None = None
        self._connect_error: TandemError | None = None
        self._thread = threading.Thread(
            target=self._connect, name=f"kv-connect-{endpoint.peer}", daemon=True
        )
        self._thread.start()

    @property
    def handle(self) -> PeerHandle | None:
        """The connection, None while it is being made."""
        return self._handle

    @property
    def is_connecting(self) -> bool:
        """Neither connected nor failed yet: ``close`` would wait."""
        return self._handle is None and self._connect_error is None

    @property
    def error(self) -> TandemError | None:
        """Why the link can carry nothing more; None while it is good or being made."""
        if self._connect_error is not None:
            return self._connect_error
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

    def close(self) -> None:
        """Disconnect; pending posts become FAILED. Waits for a connect that is under way."""
        self._thread.join()
        if self._handle is not None:
            self._transport.disconnect(self._handle)

    def _connect(self) -> None:
        try:
            self._handle = self._transport.connect(self.endpoint.peer, self.endpoint.endpoint)
        except TandemError as error:
            self._connect_error = error
        except Exception as error:
            self._connect_error = InternalError(f"connect to {self.endpoint.peer}: {error!r}")
        self._on_connected()
