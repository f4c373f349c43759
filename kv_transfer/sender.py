"""The prefill rank's half of a hand-over: background threads that push finished blocks into
decode's memory.

The engine loop only enqueues (``open``, ``push``, ``finish``, ``abandon`` return at once); the
lanes own planning, posting, polling and deadlines. All ranks of a prefill worker make the same
calls and each sends its share of every push. Each ticket ends in exactly one
``on_closed(SendReport)``, after its last post is over; only then may its source blocks be freed.

What is never done: post the writes of a failed post again. Their permission may be void by then
(decode fenced us and gave the blocks away), so a retry needs a new ticket.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence

from kv_transfer.layout import KVLayout
from kv_transfer.metadata import MetadataRecord, SlotArray, SlotLayout
from kv_transfer.post_builder import PostBuilder
from kv_transfer.sender_commands import Abandon, Finish, LaneOptions, Open, Push
from kv_transfer.sender_lane import SenderLane
from kv_transfer.ticket import PeerEndpoint, SendReport, SendTicket
from kv_transfer.transport import MemoryRegion, Transport
from runtime.errors import DrainingError


class KVSender:
    """All open tickets of one prefill rank, by nonce: a request that is tried again has a new one
    while its first may still drain. Every method may be called from any thread and never
    blocks but ``close``.

    ``layout`` is the peers'. ``kv_region`` is our KV pool, registered with the transport by the
    caller; ``part`` of ``num_parts`` is our rank and the number of ranks. With ``splits_heads`` our
    pool has our share of the heads, else all of the KV, of which we send our share. ``on_closed``
    runs on a lane's thread and must not block; it may call this object.
    """

    def __init__(
        self,
        transport: Transport,
        layout: KVLayout,
        slot_layout: SlotLayout,
        *,
        kv_region: MemoryRegion,
        on_closed: Callable[[SendReport], None],
        part: int = 0,
        num_parts: int = 1,
        splits_heads: bool = False,
        num_threads: int = 2,
        options: LaneOptions | None = None,
    ) -> None:
        if not 0 <= part < num_parts <= slot_layout.max_parts:
            raise ValueError(f"part {part} of {num_parts}: at most {slot_layout.max_parts} parts")
        if num_threads < 1:
            raise ValueError(f"num_threads = {num_threads}: must be at least 1")
        self._part = part
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._lane_of: dict[int, SenderLane] = {}  # open tickets, by nonce
        self._is_closed = False
        self._num_ignored = 0
        options = options or LaneOptions()
        self._lanes = []
        for index in range(num_threads):
            staging = SlotArray(options.num_staging_slots, slot_layout)
            builder = PostBuilder(
                layout,
                staging,
                kv_region=kv_region,
                part=part,
                num_parts=num_parts,
                splits_heads=splits_heads,
                max_post_bytes=options.max_post_bytes,
                max_staging_slots=options.max_staging_slots_per_peer,
            )
            lane = SenderLane(
                transport,
                builder,
                staging,
                on_closed=self._ticket_closed,
                name=f"kv-sender-{index}",
                options=options,
            )
            self._lanes.append(lane)

    @property
    def num_open(self) -> int:
        """Tickets without a report yet."""
        return len(self._lane_of)

    @property
    def num_ignored(self) -> int:
        """Calls for tickets that were closed already (a deadline, a lost peer): normal, but worth
        seeing.
        """
        return self._num_ignored

    @property
    def is_alive(self) -> bool:
        """Whether every lane's thread runs."""
        return all(lane.is_alive for lane in self._lanes)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes posted and not yet complete, over all lanes."""
        return sum(lane.bytes_in_flight for lane in self._lanes)

    def open(self, ticket: SendTicket, peer: PeerEndpoint) -> None:
        """Start a hand-over. All tickets of one peer share a lane and a connection.

        Raises:
            ValueError: a ticket with this nonce is open already.
            DrainingError: ``close`` was called.
        """
        lane = self._lanes[zlib.crc32(peer.peer.encode()) % len(self._lanes)]
        with self._lock:
            if self._is_closed:
                raise DrainingError("the KV sender is closed", request_id=ticket.request_id)
            if ticket.nonce in self._lane_of:
                raise ValueError(f"ticket {ticket.nonce:016x} is open already")
            self._lane_of[ticket.nonce] = lane
            lane.submit(Open(ticket, peer, time.monotonic()))

    def push(
        self,
        nonce: int,
        src_block_ids: Sequence[int],
        first_block_index: int,
        *,
        layers: tuple[int, int] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        """Send our share of ``src_block_ids`` (layers ``[a, b)``, None is all) when ``ready`` first
        returns True.

        They go to the ticket's blocks from ``first_block_index`` on. ``ready`` is called on a
        lane's thread, must not block, and None means now. Ignored when the ticket is closed.
        """
        blocks = tuple(src_block_ids)
        self._submit(nonce, Push(nonce, blocks, first_block_index, layers, ready))

    def finish(self, nonce: int, record: MetadataRecord | None = None) -> None:
        """No push follows. Part 0 passes the record, the others None. Ignored when the ticket is
        closed.

        Raises:
            ValueError: a record from another part, or none from part 0.
        """
        if (record is None) == (self._part == 0):
            raise ValueError(
                f"ticket {nonce:016x}: part 0 alone sends the record, this is part {self._part}"
            )
        self._submit(nonce, Finish(nonce, record))

    def abandon(self, nonce: int) -> None:
        """Post no more, then report ABANDONED when what is in flight is complete. Ignored when the
        ticket is closed.
        """
        self._submit(nonce, Abandon(nonce))

    def close(self) -> None:
        """Abandon all tickets, deliver their reports, join all threads. Takes at most the drain
        timeout. Idempotent.
        """
        with self._lock:
            self._is_closed = True
        for lane in self._lanes:
            lane.stop()
        for lane in self._lanes:
            lane.join()

    def _submit(self, nonce: int, command: Push | Finish | Abandon) -> None:
        with self._lock:
            lane = self._lane_of.get(nonce)
            if lane is None:
                self._num_ignored += 1
            else:
                lane.submit(command)

    def _ticket_closed(self, report: SendReport) -> None:
        with self._lock:
            del self._lane_of[report.nonce]
        self._on_closed(report)
