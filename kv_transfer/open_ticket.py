"""The state of one ticket while it is open on a sender lane. It posts nothing itself: the lane asks
it what is next.

    data pushes  ->  (all posted, finish called)  record (part 0)  ->  (all DONE)  flag  ->  (DONE)
    SENT

A ticket stops when it is abandoned or has an error: nothing more is handed out, and it is over when
the last of its posts is. No time runs while its prompt is computed. Belongs to its lane's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.metadata import MetadataRecord
from kv_transfer.ticket import PeerEndpoint, SendOutcome, SendReport, SendTicket
from kv_transfer.transport import RegionWrite
from runtime.budget import Budget, BudgetKind, earliest
from runtime.errors import TandemError


@dataclass(slots=True)
class QueuedPush:
    """Planned writes of one push, the last first (they are popped), and whether the source is
    written yet.
    """

    writes: list[RegionWrite]
    ready: Callable[[], bool] | None


@dataclass(slots=True, kw_only=True)
class OpenTicket:
    """One ticket, from ``KVSender.open`` to its report."""

    ticket: SendTicket
    peer: PeerEndpoint
    opened_at: float
    drain_timeout_s: float
    """After an error: for the posts in flight to end."""
    limit: Budget | None = None
    """None while the prompt is computed. Then for the transfer, at last for the drain."""
    pushes: deque[QueuedPush] = field(default_factory=deque)
    is_finishing: bool = False
    record: MetadataRecord | None = None
    staging_slot: int | None = None
    is_flag_posted: bool = False
    is_abandoned: bool = False
    error: TandemError | None = None
    is_drained: bool = True
    num_in_flight: int = 0
    num_bytes: int = 0
    num_descriptors: int = 0
    num_posts: int = 0
    post_s: float = 0.0
    wire_s: float = 0.0
    first_post_at: float | None = None
    last_done_at: float | None = None
    _busy_since: float = 0.0

    @property
    def request_id(self) -> str:
        """Of the ticket, for messages."""
        return self.ticket.request_id

    @property
    def nonce(self) -> int:
        """Of the ticket: what it is known by."""
        return self.ticket.nonce

    @property
    def is_stopped(self) -> bool:
        """Nothing more may be posted."""
        return self.is_abandoned or self.error is not None

    @property
    def is_over(self) -> bool:
        """No post is in flight and none will follow: the report is due."""
        return self.num_in_flight == 0 and (self.is_stopped or self.is_flag_posted)

    @property
    def wants_staging(self) -> bool:
        """All data is posted, and record or flag need a staging slot."""
        return (
            self.is_finishing
            and not self.is_stopped
            and not self.pushes
            and self.staging_slot is None
        )

    @property
    def wants_flag(self) -> bool:
        """Everything else is in the peer's memory: the flag may be posted."""
        return (
            self.staging_slot is not None
            and not self.is_stopped
            and not self.pushes
            and self.num_in_flight == 0
            and not self.is_flag_posted
        )

    def finish(self, record: MetadataRecord | None, now: float) -> None:
        """No push follows: the time of the transfer begins."""
        self.record = record
        self.is_finishing = True
        self.limit = self.ticket.transfer_time(now)

    def fail(self, error: TandemError, now: float) -> None:
        """Stop with the first error; later ones follow from it."""
        if self.error is None:
            error.request_id = error.request_id or self.request_id
            self.error = error
            self.limit = self._drain_time(now)
        self.pushes.clear()

    def abandon(self, now: float) -> None:
        """Stop without an error, and drain in the time of a transfer. With the flag posted it is
        too late.
        """
        self.is_abandoned = not self.is_flag_posted
        self.pushes.clear()
        if self.limit is None:
            self.limit = self.ticket.transfer_time(now)

    def hurry(self, now: float) -> None:
        """Abandon, and drain no longer than after an error."""
        self.abandon(now)
        assert self.limit is not None
        self.limit = earliest((self.limit, self._drain_time(now)))

    def posted(self, num_writes: int, now: float, post_s: float) -> None:
        """A post with ``num_writes`` of ours was started."""
        if self.num_in_flight == 0:
            self._busy_since = now
        if self.first_post_at is None:
            self.first_post_at = now
        self.num_in_flight += 1
        self.num_posts += 1
        self.num_descriptors += num_writes
        self.post_s += post_s

    def settled(self, num_bytes: int, error: TandemError | None, now: float) -> None:
        """A post with ``num_bytes`` of ours is over."""
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self.wire_s += now - self._busy_since
        if error is None:
            self.num_bytes += num_bytes
            self.last_done_at = now
        else:
            self.is_drained = False
            self.fail(error, now)

    def give_up(self, error: TandemError, now: float) -> None:
        """The lane lost track of its posts: none is waited for, none is known to be complete."""
        self.is_drained = False
        self.num_in_flight = 0
        self.fail(error, now)

    def waiting_for(self) -> str:
        """What an open ticket waits for, for the message when its time is over."""
        if self.num_in_flight:
            return f"{self.num_in_flight} posts in flight"
        if self.pushes:
            return f"{len(self.pushes)} pushes that are computed or queued"
        return "room in the staging memory" if self.is_finishing else "more KV from the engine"

    def report(self) -> SendReport:
        """The ticket is over; this is how."""
        assert self.is_over, self
        if self.error is not None:
            outcome = SendOutcome.FAILED
        else:
            outcome = SendOutcome.ABANDONED if self.is_abandoned else SendOutcome.SENT
        return SendReport(
            request_id=self.request_id,
            nonce=self.ticket.nonce,
            peer=self.peer.peer,
            outcome=outcome,
            error=self.error,
            drained=self.is_drained,
            num_bytes=self.num_bytes,
            num_descriptors=self.num_descriptors,
            num_posts=self.num_posts,
            opened_at=self.opened_at,
            first_post_at=self.first_post_at,
            last_done_at=self.last_done_at,
            post_s=self.post_s,
            wire_s=self.wire_s,
        )

    def _drain_time(self, now: float) -> Budget:
        return Budget.start(BudgetKind.TRANSFER, self.drain_timeout_s, now)
