"""One request as the decode rank sees it: the engine's request plus its place in the life cycle.

No decisions are made here. The engine loop's thread is the only one that changes a
`DecodeRequest`; times are seconds of the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.request import Request
from kv_transfer.transport import peer_name
from runtime.budget import Budget
from runtime.errors import TandemError
from runtime.pb import common_pb2
from runtime.tiers import NO_TIER, Standing
from runtime.trace.context import TraceContext
from worker.lifecycle import DecodeStatus, check_transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Who may write a request's KV: ranks of one prefill instance, in one life.

    All ranks of a tensor-parallel instance are one writer, each rank of a data-parallel one is.
    """

    instance: str
    epoch: int
    rank: int = 0
    """The first, which speaks for all."""
    num_ranks: int
    """Each writes one part."""
    address: str
    """gRPC "host:port" of the first rank, for Revoke."""

    @property
    def key(self) -> str:
        """Its name in the quarantine and among the fences; another epoch is another writer."""
        return peer_name(self.instance, self.epoch, self.rank)

    @property
    def peers(self) -> list[str]:
        """The names of its ranks on the transport."""
        last = self.rank + self.num_ranks
        return [peer_name(self.instance, self.epoch, rank) for rank in range(self.rank, last)]

    def has_rank(self, rank: int) -> bool:
        """Whether this rank of the instance writes one of the parts."""
        return 0 <= rank - self.rank < self.num_ranks


def writer_key(prefill: common_pb2.WorkerIdentity) -> str:
    """`Writer.key` of the worker whose first rank this is."""
    return peer_name(prefill.instance, prefill.epoch, prefill.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketUpdate:
    """Blocks are allocated: what the prefill worker must know to write."""

    nonce: int
    num_cached_tokens: int
    block_ids: tuple[int, ...]
    """The blocks of the context after the cached prefix, in order of positions."""
    metadata_slot: int
    timeout_s: float
    fence_generation: int
    """Fences of the writer before the allocation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedUpdate:
    """The request is over without blocks."""

    error: TandemError


ClaimUpdate = TicketUpdate | RejectedUpdate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Claim:
    """One call in which a writer asks for a request's ticket. Equal only to itself."""

    nonce: int
    writer_key: str
    """`Writer.key` of the caller."""
    num_ranks: int
    """Of the caller."""
    tell: Callable[[ClaimUpdate], None]
    """Takes the answer, once; called on the loop's thread."""


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRequest:
    """A request between Reserve and its last frame. Equal only to itself.

    Attributes:
        request: tokens, block table and progress, as the engine reads them.
        serial: order of arrival at this rank; lower is older.
        standing: before whom it goes, and what its tier of service is promised.
        nonce: random name of the reservation and of its ticket; never 0.
        router_id: whose frames carry the tokens.
        row_id: its name in the rows of frames; 0: the router reads none.
        writer: who may write its KV.
        budget: of the whole request.
        status: the life cycle; changed by `move_to` only.
        claims: calls that wait for the ticket, or were given it.
        num_bypasses: how many younger requests were let in before it.
        claimed_at: when the writer asked for the ticket.
        allocated_at: when its blocks were allocated.
        transfer: when its KV must be complete; from the ticket on.
        arrived_at: when the KV was complete.
        started_at: when its first step was planned.
        timings: seconds spent so far, for the router.
        is_parked: whether it has run, and left its place to a tier before its own.
        has_news: whether a delta was emitted; the first and the last carry `timings`.
        trace: of the call that reserved its place.
        reserved_at: when that was.
    """

    request: Request
    serial: int
    nonce: int
    router_id: str
    writer: Writer
    budget: Budget
    row_id: int = 0
    standing: Standing = NO_TIER
    status: DecodeStatus = DecodeStatus.RESERVED
    claims: list[Claim] = field(default_factory=list)
    num_bypasses: int = 0
    claimed_at: float = 0.0
    allocated_at: float = 0.0
    transfer: Budget | None = None
    arrived_at: float = 0.0
    started_at: float = 0.0
    timings: common_pb2.Timings = field(default_factory=common_pb2.Timings)
    is_parked: bool = False
    has_news: bool = False
    trace: TraceContext | None = None
    reserved_at: float = 0.0

    @property
    def request_id(self) -> str:
        """The router's id of the request."""
        return self.request.request_id

    @property
    def first_index(self) -> int:
        """Output index of the token that arrives with the KV."""
        return self.request.num_context_tokens - self.request.num_prompt_tokens

    def move_to(self, status: DecodeStatus) -> None:
        """Change the status; an illegal move is an InternalError."""
        check_transition(self.status, status, self.request_id)
        self.status = status

    def tell_claims(self, update: ClaimUpdate) -> None:
        """Answer every call that waits for the ticket."""
        for claim in self.claims:
            claim.tell(update)


def place_of(request: DecodeRequest) -> tuple[int, ...]:
    """The key by which queues are in order: tier, priority, age."""
    return (*request.standing.place, request.serial)
