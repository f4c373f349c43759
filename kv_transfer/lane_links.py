"""The connections of one sender lane: which one a new ticket takes, and when each one goes.

Belongs to the lane's thread. No method but ``close`` waits for a peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kv_transfer.open_ticket import OpenTicket
from kv_transfer.peer_link import PeerLink
from kv_transfer.ticket import PeerEndpoint
from kv_transfer.transport import Transport
from runtime.budget import Budget


class LaneLinks:
    """All links of a lane, the oldest first."""

    def __init__(self, transport: Transport, *, on_change: Callable[[], None]) -> None:
        self._transport = transport
        self._on_change = on_change
        self._current: dict[str, PeerLink] = {}  # the link that new tickets use, by peer
        self._links: list[PeerLink] = []  # also those that are superseded or being closed

    def __iter__(self) -> Iterator[PeerLink]:
        return iter(self._links)

    def to(self, peer: PeerEndpoint) -> PeerLink:
        """The link for a new ticket; a new one where there is none, or none with this endpoint."""
        link = self._current.get(peer.peer)
        if link is None or link.error or link.endpoint.endpoint != peer.endpoint:
            link = PeerLink(self._transport, peer, on_change=self._on_change)
            self._current[peer.peer] = link
            self._links.append(link)
        return link

    def limits(self) -> list[tuple[PeerLink, OpenTicket, Budget]]:
        """Every limit of time that runs now."""
        return [
            (link, ticket, limit)
            for link in self._links
            for ticket in link.tickets.values()
            if (limit := link.limit_of(ticket)) is not None
        ]

    def forget(self, ticket: OpenTicket) -> None:
        """The ticket is over."""
        for link in self._links:
            link.tickets.pop(ticket.nonce, None)

    def fail_lost(self) -> None:
        """Fail the tickets of links that are lost; new ones get a new link."""
        for link in self._links:
            error = link.error
            if error is None:
                continue
            for ticket in link.tickets.values():
                ticket.fail(type(error)(error.message), time.monotonic())
            if self._current.get(link.endpoint.peer) is link:
                del self._current[link.endpoint.peer]

    def close_unused(self) -> None:
        """Let go of links without tickets that no new ticket will use."""
        for link in list(self._links):
            is_current = self._current.get(link.endpoint.peer) is link
            if is_current or link.tickets:
                continue
            link.begin_close()
            if link.is_closed:
                self._links.remove(link)

    def close(self) -> None:
        """Close and forget all of them; waits until nothing reads the sources of their posts."""
        for link in self._links:
            link.begin_close()
        for link in self._links:
            link.close()
        self._links.clear()
        self._current.clear()
