"""The values around one request's hand-over, as the sender sees them: permission, peer, report.

A ``SendTicket`` is decode's permission to write one request's blocks and one metadata slot, once. A
``PeerEndpoint`` comes with the first claim at a decode rank; it is cached per rank and epoch.

**Why both carry a fence generation.** Decode may fence a silent writer and give the blocks of its
tickets away. A writer that wakes up later cannot use its old connection, nor connect with its old
endpoint; but with its next claim it gets a new one, and could use an old ticket with that. So a
ticket must be at least as new as the endpoint that it is used with; an older one is refused as
stale, by the sender itself.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from runtime.budget import Budget, BudgetKind
from runtime.errors import TandemError

_TIMEOUT_SETTING = "kv_transfer.transfer_timeout_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEndpoint:
    """A decode rank's memory as a sender reaches it; comes with a ticket where there is none."""

    peer: str
    """``transport.peer_name`` of the decode rank."""
    endpoint: bytes
    kv_region_bytes: int
    metadata_region_bytes: int
    fence_generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTicket:
    """Permission to write one request's KV."""

    request_id: str
    nonce: int
    epoch: int
    """Of the decode process that allocated; goes into the record and the flags."""
    block_ids: tuple[int, ...]
    """Decode's blocks, from the first block after the prefix that it holds already."""
    slot: int
    timeout_s: float
    """From ``KVSender.finish`` to its report, or from ``abandon``: while the prompt is computed no
    time runs. Also how long the peer's posts may stand still. Then it fails with
    TransferFailedError."""
    fence_generation: int = 0

    def transfer_time(self, since: float) -> Budget:
        """The time that this ticket gives a transfer, from ``since`` (monotonic) on."""
        return Budget.start(BudgetKind.TRANSFER, self.timeout_s, since, _TIMEOUT_SETTING)


class SendOutcome(enum.Enum):
    """How a ticket ended on this rank."""

    SENT = "sent"
    """Every write and the flag are in the peer's memory."""
    ABANDONED = "abandoned"
    """``abandon`` was called; what was posted before is complete."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """The one and last word on a ticket: nothing reads its source blocks any more. Times in
    seconds.
    """

    request_id: str
    nonce: int
    peer: str
    outcome: SendOutcome
    error: TandemError | None
    drained: bool
    """Every posted write is known to be complete. False (only with FAILED): a write may still land
    until decode fences this rank, so decode must fence before it frees the blocks."""
    num_bytes: int
    """Of completed posts."""
    num_descriptors: int
    num_posts: int
    opened_at: float
    """Monotonic clock of this process, as the next two."""
    first_post_at: float | None
    last_done_at: float | None
    post_s: float
    """Spent in the transport's ``post`` (a post shared by several requests counts for each)."""
    wire_s: float
    """During which at least one post of this ticket was in flight."""
