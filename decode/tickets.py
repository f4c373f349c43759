"""Tickets: which blocks a prefill worker may write now, and when they are really ours again.

A ticket is one allocation: blocks, a metadata slot, and the reservation's nonce. Its parts
(one per rank of the writer) write until they close it. From the writer's side it is over when every
part has arrived, or closed, or was fenced; only then can its blocks go to somebody else. A request
that ends before that leaves its blocks in quarantine:

    open -> OPEN --arrive--> settled (blocks are the request's alone)
            OPEN --cancel, no part left--> settled (blocks freed)
            OPEN --cancel--> quarantine --last part closes | revoked | fenced--> settled

Of settled tickets the writer and its open parts are remembered for a while, so that a late closing
is not taken for a stale one.
The desk never calls anybody: `cancel` says what has to be asked of the writer. Pure but for the
receiver and slots it is given; used by the engine loop's thread only.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decode.requests import DecodeRequest, TicketUpdate, Writer
from engine.memory.block_pool import BlockPool
from engine.request import num_blocks_for
from kv_transfer.ownership import Quarantine, Released
from runtime.block_hash import max_cached_blocks
from runtime.errors import InternalError

_MAX_SETTLED = 8192
"""A few hundred bytes each."""


class Expecter(Protocol):
    """What the desk needs of a `KVReceiver`."""

    def expect(self, request_id: str, nonce: int, num_parts: int) -> int:
        """Await an allocation; return its metadata slot."""
        ...

    def forget(self, request_id: str) -> bool:
        """Await it no more."""
        ...


class Slots(Protocol):
    """What the desk needs of a `SlotArray`."""

    @property
    def num_free(self) -> int:
        """Slots that can be allocated now."""
        ...

    def free(self, slot: int) -> None:
        """Zero the slot and make it allocatable."""
        ...


class WriterDemand(enum.Enum):
    """What has to be asked of a writer before the blocks of a cancelled ticket are free."""

    NOTHING = "nothing"
    """They are free already, or will be when the parts close."""
    REVOKE = "revoke"
    """Tell it to stop."""
    FENCE = "fence"
    """Shut it out: it does not know itself what may still land."""


@dataclass(slots=True, kw_only=True)
class Ticket:
    """One allocation.

    Attributes:
        request: whose.
        update: what the writer is told.
        slot: of its metadata.
        block_ids: the blocks that the writer may write.
        open_parts: ranks of the writer, counted from its first, that may still write.
        undrained: a part failed without knowing whether its writes are complete.
        fenced: the writer was shut out after this ticket was issued.
        all_sent_at: when the last part closed as sent; 0.0 before.
    """

    request: DecodeRequest
    update: TicketUpdate
    slot: int
    block_ids: tuple[int, ...]
    open_parts: set[int] = field(default_factory=set)
    undrained: bool = False
    fenced: bool = False
    all_sent_at: float = 0.0

    @property
    def nonce(self) -> int:
        """Its name."""
        return self.request.nonce

    @property
    def is_over(self) -> bool:
        """Whether no write can come any more, as far as the parts' own word goes."""
        return self.fenced or not (self.open_parts or self.undrained)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledTicket:
    """What is left of a ticket whose blocks are nobody's but ours; nothing of its request."""

    writer: Writer
    open_parts: set[int]


class TicketDesk:
    """All tickets of one decode rank."""

    def __init__(
        self,
        pool: BlockPool,
        slots: Slots,
        receiver: Expecter,
        quarantine: Quarantine,
        *,
        fence_generation: Callable[[str], int],
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._receiver = receiver
        self._quarantine = quarantine
        self._fence_generation = fence_generation
        self._open: dict[str, Ticket] = {}  # by request id
        self._by_nonce: dict[int, Ticket] = {}  # open and quarantined
        self._settled: OrderedDict[int, SettledTicket] = OrderedDict()

    @property
    def num_open(self) -> int:
        """Requests that wait for their KV."""
        return len(self._open)

    @property
    def requests(self) -> list[DecodeRequest]:
        """Requests that wait for their KV."""
        return [ticket.request for ticket in self._open.values()]

    @property
    def has_free_slot(self) -> bool:
        """Whether another ticket can be issued, as far as slots go."""
        return self._slots.num_free > 0

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks that nobody uses and that a writer may still touch."""
        return self._quarantine.num_blocks

    def quarantined_blocks(self) -> dict[str, int]:
        """The same by writing instance; only those that have some."""
        return self._quarantine.num_blocks_by(
            lambda nonce: self._by_nonce[nonce].request.writer.instance
        )

    @property
    def num_quarantined(self) -> int:
        """Allocations in quarantine."""
        return self._quarantine.num_entries

    def num_blocks_to_take(self, request: DecodeRequest) -> int:
        """Free blocks that a ticket for the request would use up now."""
        block_size = self._pool.block_size
        num_found, num_idle = self._pool.count_idle_prefix(_cacheable(request, block_size))
        return _num_blocks(request, block_size) - num_found + num_idle

    def open(self, request: DecodeRequest, timeout_s: float) -> TicketUpdate:
        """Allocate for a request: its context, room for the token after that, a slot.

        Whatever it raises, nothing has changed.

        Raises:
            OutOfBlocksError, OverloadedError: ask `num_blocks_to_take` and `has_free_slot` first.
        """
        inner, nonce, block_size = request.request, request.nonce, self._pool.block_size
        shared = self._pool.match_prefix(_cacheable(request, block_size))
        try:
            block_ids = self._pool.allocate(_num_blocks(request, block_size) - len(shared))
        except Exception:
            self._pool.release(shared)
            raise
        try:
            slot = self._receiver.expect(request.request_id, nonce, request.writer.num_ranks)
        except Exception:
            self._pool.release([*shared, *block_ids])
            raise
        num_written = num_blocks_for(inner.num_context_tokens, block_size) - len(shared)
        update = TicketUpdate(
            nonce=nonce,
            num_cached_tokens=len(shared) * block_size,
            block_ids=tuple(block_ids[:num_written]),
            metadata_slot=slot,
            timeout_s=timeout_s,
            fence_generation=self._fence_generation(request.writer.key),
        )
        ticket = Ticket(
            request=request,
            update=update,
            slot=slot,
            block_ids=update.block_ids,
            open_parts=set(range(request.writer.num_ranks)),
        )
        inner.block_table = [*shared, *block_ids]
        inner.num_cached_tokens = update.num_cached_tokens
        self._open[request.request_id] = ticket
        self._by_nonce[nonce] = ticket
        return update

    def ticket_of(self, request: DecodeRequest) -> Ticket:
        """The open ticket of a request in WAITING_FOR_KV."""
        return self._open[request.request_id]

    def open_ticket(self, nonce: int) -> Ticket | None:
        """The ticket, while its request waits for the KV."""
        ticket = self._by_nonce.get(nonce)
        return ticket if ticket is not None and self.is_open(ticket) else None

    def usable_ticket(self, nonce: int) -> Ticket | None:
        """The same, unless its writer was shut out since."""
        ticket = self.open_ticket(nonce)
        return None if ticket is None or ticket.fenced else ticket

    def arrive(self, nonce: int) -> DecodeRequest | None:
        """All parts of an allocation have landed: nobody writes into it any more.

        Returns:
            The request, which now owns its blocks alone; None if it is over already.
        """
        ticket = self._by_nonce.get(nonce)
        if ticket is None:
            return None
        if self._free(self._quarantine.drained(nonce)):
            return None
        del self._open[ticket.request.request_id]
        self._slots.free(ticket.slot)
        self._settle(ticket)
        return ticket.request

    def writer_of(self, nonce: int) -> Writer | None:
        """Who may, or might, write under the nonce; None if it is not ours, or long forgotten."""
        ticket, settled = self._by_nonce.get(nonce), self._settled.get(nonce)
        if ticket is not None:
            return ticket.request.writer
        return None if settled is None else settled.writer

    def close_part(self, nonce: int, rank: int, *, drained: bool) -> Ticket | None:
        """A part says that it will write no more; the ticket, if that is news to it.

        Args:
            nonce: of a ticket whose writer has the rank: see `writer_of`.
            rank: of the prefill instance; parts are counted from the writer's first.
            drained: whether it knows that its writes are complete; if not, it counts as open.
        """
        ticket = self._by_nonce.get(nonce)
        if ticket is None:
            settled = self._settled[nonce]
            settled.open_parts.discard(rank - settled.writer.rank)
            return None
        part = rank - ticket.request.writer.rank
        if drained:
            ticket.open_parts.discard(part)
            if nonce in self._quarantine and not ticket.undrained:
                self._free(self._quarantine.close_part(nonce, part))
        else:
            ticket.undrained = True
        return ticket

    def is_open(self, ticket: Ticket) -> bool:
        """Whether its request still waits for the KV."""
        return self._open.get(ticket.request.request_id) is ticket

    def cancel(self, request: DecodeRequest) -> WriterDemand:
        """End the ticket of a request in WAITING_FOR_KV; its block table is empty afterwards."""
        ticket = self._open.pop(request.request_id)
        self._receiver.forget(request.request_id)
        block_table, request.request.block_table = request.request.block_table, []
        if ticket.is_over:
            self._pool.release(block_table)
            self._slots.free(ticket.slot)
            self._settle(ticket)
            return WriterDemand.NOTHING
        written = set(ticket.block_ids)
        # A block that the writer never had is free at once: the cached prefix, and room beyond
        # the context.
        self._pool.release([block for block in block_table if block not in written])
        self._quarantine.add(
            request.request_id,
            ticket.nonce,
            block_ids=ticket.block_ids,
            slot=ticket.slot,
            writer=request.writer.key,
            open_parts=ticket.open_parts or {0},
        )
        return WriterDemand.FENCE if ticket.undrained else WriterDemand.REVOKE

    def drained(self, nonce: int) -> None:
        """The writer has answered that it will never write under this nonce."""
        ticket = self._by_nonce.get(nonce)
        if ticket is not None and not ticket.undrained:
            self._free(self._quarantine.drained(nonce))

    def due_for_fence(self) -> set[Writer]:
        """Writers of allocations that have been in quarantine for too long."""
        due = self._quarantine.due_for_fence()
        return {self._by_nonce[entry.nonce].request.writer for entry in due}

    def nonces_of(self, writer: Writer) -> tuple[int, ...]:
        """All tickets that a fence of `writer` which starts now will settle, waiting ones too."""
        return tuple(
            nonce for nonce, ticket in self._by_nonce.items() if ticket.request.writer == writer
        )

    def needs_fence(self, nonce: int) -> bool:
        """Whether the allocation is still in quarantine."""
        return nonce in self._quarantine

    def fenced(self, nonces: Iterable[int]) -> None:
        """The writer was shut out: nothing of it lands under these tickets any more.

        Requests that still wait keep waiting: their parts may all have landed before. If not, the
        writer reports a failure, or the ticket times out; then nothing has to be asked any more.
        """
        nonces = tuple(nonces)
        for nonce in nonces:
            ticket = self._by_nonce.get(nonce)
            if ticket is not None:
                ticket.fenced = True
        for released in self._quarantine.release_fenced(nonces):
            self._free(released)

    def check_integrity(self) -> None:
        """Raise InternalError unless every ticket is open or in quarantine."""
        self._quarantine.check_integrity()
        if len(self._by_nonce) != len(self._open) + self._quarantine.num_entries:
            raise InternalError(
                f"{len(self._by_nonce)} tickets, but {len(self._open)} are open and "
                f"{self._quarantine.num_entries} in quarantine"
            )

    def _free(self, released: Released | None) -> bool:
        if released is None:
            return False
        self._pool.release(released.block_ids)
        self._slots.free(released.slot)
        self._settle(self._by_nonce[released.nonce])
        return True

    def _settle(self, ticket: Ticket) -> None:
        del self._by_nonce[ticket.nonce]
        self._settled[ticket.nonce] = SettledTicket(
            writer=ticket.request.writer, open_parts=ticket.open_parts
        )
        if len(self._settled) > _MAX_SETTLED:
            self._settled.popitem(last=False)


def _cacheable(request: DecodeRequest, block_size: int) -> Sequence[bytes]:
    """Hashes of the context that a cache may give; the last token is always computed anew."""
    inner = request.request
    # Made when the request came (`decode.validation`): what is left to hash here is nothing.
    hashes = inner.update_block_hashes(block_size)
    return hashes[: max_cached_blocks(inner.num_context_tokens, block_size)]


def _num_blocks(request: DecodeRequest, block_size: int) -> int:
    return num_blocks_for(request.request.num_context_tokens + 1, block_size)
