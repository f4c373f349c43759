"""Turns what the tickets of one link have to send into one post: planning, staging, merging. No
I/O.

Order within a ticket is kept: pushes first in, first out; then the record; then, when all of that
is DONE, the flag. Across tickets there is no order, so whatever waits at the same time shares a
post.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kv_transfer.layout import KVLayout
from kv_transfer.metadata import SlotArray, encode_flag, encode_record
from kv_transfer.open_ticket import OpenTicket, QueuedPush
from kv_transfer.plan import Write, plan_head_writes, plan_writes
from kv_transfer.sender_commands import Push
from kv_transfer.ticket import PeerEndpoint, SendTicket
from kv_transfer.transport import KV_REGION, METADATA_REGION, MemoryRegion, RegionWrite
from runtime.errors import InternalError, StaleTicketError, TandemError, TransferFailedError

_MAX_WRITES_PER_POST = 4096


@dataclass(frozen=True, slots=True)
class PostShare:
    """One ticket's part of a post."""

    ticket: OpenTicket
    num_writes: int
    num_bytes: int


@dataclass(slots=True)
class PostDraft:
    """A post before it is posted."""

    writes: list[RegionWrite] = field(default_factory=list)
    shares: list[PostShare] = field(default_factory=list)
    flag_slots: list[int] = field(default_factory=list)
    """The peer's slots whose flags are among the writes: what to notify it of."""
    num_bytes: int = 0
    num_staged: int = 0
    """Staging slots that the peer's tickets hold."""
    is_blocked_on_ready: bool = False
    """Some push still waits for its source to be written."""


class PostBuilder:
    """The planning of one lane; it knows our memory, our part, and the sizes."""

    def __init__(
        self,
        layout: KVLayout,
        staging: SlotArray,
        *,
        kv_region: MemoryRegion,
        part: int,
        num_parts: int,
        splits_heads: bool = False,
        max_post_bytes: int,
        max_staging_slots: int,
    ) -> None:
        self._layout = layout  # of the peers
        self._splits_heads = splits_heads and num_parts > 1
        self._own_layout = layout.of_part(num_parts) if self._splits_heads else layout
        self._staging = staging
        self._kv_region = kv_region
        self._part = part
        self._num_parts = num_parts
        self._max_post_bytes = max_post_bytes
        self._max_staging_slots = max_staging_slots  # of one peer

    def check(self, ticket: SendTicket, peer: PeerEndpoint) -> TandemError | None:
        """Why ``ticket`` must not be used with ``peer``, before anything is sent."""
        if ticket.fence_generation < peer.fence_generation:
            return StaleTicketError(
                f"ticket of {peer.peer} from before its fence {peer.fence_generation} "
                f"(the ticket has {ticket.fence_generation})"
            )
        num_blocks = peer.kv_region_bytes // self._layout.block_bytes
        outside = [block for block in ticket.block_ids if not 0 <= block < num_blocks]
        if outside:
            return TransferFailedError(
                f"{peer.peer} has {num_blocks} blocks, not block {outside[0]}"
            )
        num_slots = peer.metadata_region_bytes // self._staging.layout.slot_bytes
        if not 0 <= ticket.slot < num_slots:
            return TransferFailedError(f"{peer.peer} has {num_slots} slots, not slot {ticket.slot}")
        return None

    def plan(self, ticket: OpenTicket, push: Push) -> QueuedPush:
        """The writes of our share of ``push``.

        Raises:
            InternalError: blocks beyond the ticket's or our own pool.
        """
        first, count = push.first_block_index, len(push.src_block_ids)
        dst_block_ids = ticket.ticket.block_ids[first : first + count]
        num_blocks = self._kv_region.nbytes // self._own_layout.block_bytes
        if first < 0 or len(dst_block_ids) != count:
            raise InternalError(
                f"push of blocks [{first}, {first + count}): "
                f"the ticket has {len(ticket.ticket.block_ids)}"
            )
        if any(block >= num_blocks for block in push.src_block_ids):
            raise InternalError(f"push of block {max(push.src_block_ids)}: we have {num_blocks}")
        writes = self._plan_share(push, dst_block_ids)
        address, most = self._kv_region.address, self._max_post_bytes
        pieces = [
            RegionWrite(
                KV_REGION,
                address + write.src_offset + start,
                write.dst_offset + start,
                min(most, write.nbytes - start),
            )
            for write in writes
            for start in range(0, write.nbytes, most)
        ]
        pieces.reverse()
        return QueuedPush(pieces, push.ready)

    def _plan_share(self, push: Push, dst_block_ids: Sequence[int]) -> list[Write]:
        if self._splits_heads:
            return plan_head_writes(
                self._layout,
                push.src_block_ids,
                dst_block_ids,
                layers=push.layers,
                part=self._part,
                num_parts=self._num_parts,
            )
        return plan_writes(
            self._layout,
            push.src_block_ids,
            dst_block_ids,
            layers=push.layers,
            # Rotated, so that many small pushes spread over all parts.
            part=(self._part - push.first_block_index) % self._num_parts,
            num_parts=self._num_parts,
        )

    def collect(self, tickets: Collection[OpenTicket], budget: int, *, is_idle: bool) -> PostDraft:
        """One post of at most ``budget`` bytes for all ``tickets`` of a peer; when ``is_idle``, its
        first write may exceed that.
        """
        draft = PostDraft(num_staged=sum(t.staging_slot is not None for t in tickets))
        budget = min(budget, self._max_post_bytes)
        for ticket in tickets:
            if ticket.is_stopped:
                continue
            try:
                writes = self._take(ticket, draft, budget, is_idle=is_idle)
            except Exception as error:
                # ``ready`` is the worker's code, and a record may not fit: one request's failure.
                ticket.fail(InternalError(f"push failed: {error!r}"), time.monotonic())
                continue
            if not writes and ticket.wants_flag:
                writes = [self._flag(ticket)]
                ticket.is_flag_posted = True
                draft.flag_slots.append(ticket.ticket.slot)
                draft.num_bytes += writes[0].nbytes
            if writes:
                num_bytes = sum(write.nbytes for write in writes)
                draft.shares.append(PostShare(ticket, len(writes), num_bytes))
                draft.writes.extend(writes)
            if len(draft.writes) >= _MAX_WRITES_PER_POST:
                break
        return draft

    def _take(
        self, ticket: OpenTicket, draft: PostDraft, budget: int, *, is_idle: bool
    ) -> list[RegionWrite]:
        taken: list[RegionWrite] = []
        self._stage(ticket, draft)
        while ticket.pushes and len(taken) < _MAX_WRITES_PER_POST:
            push = ticket.pushes[0]
            if push.ready is not None:
                if not push.ready():
                    draft.is_blocked_on_ready = True
                    break
                push.ready = None
            if push.writes:
                fits = draft.num_bytes + push.writes[-1].nbytes <= budget
                if not fits and not (is_idle and draft.num_bytes == 0):
                    break
                taken.append(push.writes.pop())
                draft.num_bytes += taken[-1].nbytes
            if not push.writes:
                ticket.pushes.popleft()
                self._stage(ticket, draft)
        return taken

    def _stage(self, ticket: OpenTicket, draft: PostDraft) -> None:
        """Copy record and flag to memory that the transport may read, once all data is posted."""
        if not ticket.wants_staging or self._staging.num_free == 0:
            return
        if draft.num_staged >= self._max_staging_slots:
            return
        draft.num_staged += 1
        slot = self._staging.allocate(ticket.ticket.nonce)
        ticket.staging_slot = slot
        layout = self._staging.layout
        flag = encode_flag(ticket.ticket.nonce, ticket.ticket.epoch)
        self._staging.write(slot, layout.flag_offset(self._part), flag)
        if ticket.record is not None:
            record = encode_record(ticket.record, layout)
            self._staging.write(slot, 0, record)
            write = self._slot_write(ticket, 0, len(record))
            ticket.pushes.append(QueuedPush([write], None))

    def _flag(self, ticket: OpenTicket) -> RegionWrite:
        layout = self._staging.layout
        return self._slot_write(ticket, layout.flag_offset(self._part), layout.flag_bytes)

    def _slot_write(self, ticket: OpenTicket, offset: int, nbytes: int) -> RegionWrite:
        assert ticket.staging_slot is not None
        return RegionWrite(
            METADATA_REGION,
            self._staging.address(ticket.staging_slot) + offset,
            ticket.ticket.slot * self._staging.layout.slot_bytes + offset,
            nbytes,
        )
