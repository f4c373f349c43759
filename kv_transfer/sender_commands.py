"""What the sender's facade tells a lane, and the bounds that a lane keeps. Plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.metadata import MetadataRecord
from kv_transfer.ticket import PeerEndpoint, SendTicket


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOptions:
    """Bounds of one lane; sizes in bytes, times in seconds."""

    max_bytes_in_flight: int = 1 << 30
    """To one peer, whatever the others take; what is above waits here, where it can still be
    abandoned."""
    max_post_bytes: int = 64 << 20
    """Smaller posts drain faster after a cancel, larger ones cost fewer round trips."""
    num_staging_slots: int = 256
    """For the records and flags of tickets in their last posts, over all peers."""
    max_staging_slots_per_peer: int = 64
    """A peer that does not move keeps no more from the others."""
    drain_timeout_s: float = 5.0
    """After an error, or when the sender closes; then the connection is closed under the posts that
    hang. An abandoned ticket drains in the time of a transfer."""
    ready_poll_s: float = 2e-4
    """How often ``ready`` is asked while a push waits for the device."""


@dataclass(frozen=True, slots=True)
class Open:
    """A new ticket."""

    ticket: SendTicket
    peer: PeerEndpoint
    opened_at: float


@dataclass(frozen=True, slots=True)
class Push:
    """Blocks are (about to be) computed."""

    nonce: int
    src_block_ids: tuple[int, ...]
    first_block_index: int
    layers: tuple[int, int] | None
    ready: Callable[[], bool] | None


@dataclass(frozen=True, slots=True)
class Finish:
    """No push follows."""

    nonce: int
    record: MetadataRecord | None


@dataclass(frozen=True, slots=True)
class Abandon:
    """Post no more."""

    nonce: int


Command = Open | Push | Finish | Abandon
