"""One request as the decode rank sees it: the engine's request plus its place in the life cycle.

No decisions are made here. The engine loop's thread is the only one that changes a
`DecodeRequest`; times are seconds of the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.request import Request
from kv_transfer.transport import peer_name
from runtime.errors import TandemError
from runtime.lifecycle import DecodeStatus, check_transition
from runtime.pb import common_pb2


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


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedUpdate:
    """Still waiting for blocks."""

    position: int
    """0 is the head of the queue."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketUpdate:
    """Blocks are allocated: what the prefill worker must know to write."""

    nonce: int
    num_cached_tokens: int
    block_ids: tuple[int, ...]
    """The blocks of the prompt after the cached prefix, in order of positions."""
    metadata_slot: int
    timeout_s: float
    fence_generation: int
    """Fences of the writer before the allocation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedUpdate:
    """The reservation is over without blocks."""

    error: TandemError


ReserveUpdate = QueuedUpdate | TicketUpdate | RejectedUpdate


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRequest:
    """A request between Reserve and its last frame. Equal only to itself.

    Attributes:
        request: tokens, block table and progress, as the engine reads them.
        serial: order of arrival at this rank; lower is older.
        router_id: whose frames carry the tokens.
        writer: who may write its KV.
        received_at: when Reserve came.
        deadline: when the whole request must be over.
        tell: hands reservation updates to the caller of Reserve; called on the loop's thread.
        status: the life cycle; changed by `move_to` only.
        num_bypasses: how many younger reservations were let in before it.
        allocated_at: when its blocks were allocated.
        transfer_deadline: when its KV must be complete; meaningful in WAITING_FOR_KV.
        arrived_at: when the KV was complete.
        timings: seconds spent so far, for the router.
        has_news: whether a delta was emitted; the first and the last carry `timings`.
    """

    request: Request
    serial: int
    router_id: str
    writer: Writer
    received_at: float
    deadline: float
    tell: Callable[[ReserveUpdate], None]
    status: DecodeStatus = DecodeStatus.RESERVED
    num_bypasses: int = 0
    allocated_at: float = 0.0
    transfer_deadline: float = 0.0
    arrived_at: float = 0.0
    timings: common_pb2.Timings = field(default_factory=common_pb2.Timings)
    has_news: bool = False

    @property
    def request_id(self) -> str:
        """The router's id of the request."""
        return self.request.request_id

    def move_to(self, status: DecodeStatus) -> None:
        """Change the status; an illegal move is an InternalError."""
        check_transition(self.status, status, self.request_id)
        self.status = status


def age_of(request: DecodeRequest) -> int:
    """The key by which queues are in order of age."""
    return request.serial
