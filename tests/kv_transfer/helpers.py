"""Memory, a decode side and a prefill side as the workers build them, small enough for a test."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import random
from collections.abc import Callable, Sequence

from kv_transfer.layout import KVDtype, KVLayout
from kv_transfer.metadata import MetadataRecord, SlotArray, SlotLayout
from kv_transfer.receiver import Arrival, KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.sender_commands import LaneOptions
from kv_transfer.ticket import PeerEndpoint, SendReport, SendTicket
from kv_transfer.transport import KV_REGION, METADATA_REGION, MemoryRegion, Transport, peer_name
from kv_transfer.transports import TransportOptions, create_transport

LAYOUT = KVLayout(dtype=KVDtype.BFLOAT16, block_size=4, num_layers=3, head_width=32)
SLOT_LAYOUT = SlotLayout(max_top_logprobs=5, mtp_hidden_bytes=64, max_parts=8)
HOST = "127.0.0.1"
TIMEOUT_S = 60.0
PREFILL_EPOCH = 0xF1
PREFILL = peer_name("prefill-0", PREFILL_EPOCH, 0)


class Pool:
    """``num_blocks`` blocks of anonymous memory."""

    def __init__(self, num_blocks: int, layout: KVLayout = LAYOUT) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.memory = mmap.mmap(-1, num_blocks * layout.block_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def region(self) -> MemoryRegion:
        return MemoryRegion(KV_REGION, self.address, len(self.memory))

    def block(self, block_id: int) -> bytes:
        start = block_id * self.layout.block_bytes
        return self.memory[start : start + self.layout.block_bytes]

    def fill_random(self) -> None:
        self.memory[:] = os.urandom(len(self.memory))

    def is_zero(self) -> bool:
        return not any(self.memory[:])


class DecodeSide:
    """A decode rank: pool, slots, receiver; arrivals end up in a queue."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        epoch: int = 0xD1,
        layout: KVLayout = LAYOUT,
        transport: str = "loopback",
        options: TransportOptions | None = None,
    ) -> None:
        self.epoch = epoch
        self.name = peer_name("decode-0", epoch, 0)
        self.pool = Pool(num_blocks, layout)
        self.transport = create_transport(
            transport, local_name=self.name, host=HOST, options=options
        )
        self.transport.register(self.pool.region())
        self.slots = SlotArray(8, SLOT_LAYOUT)
        self.transport.register(self.slots.region(METADATA_REGION))
        self.arrivals: queue.Queue[Arrival] = queue.Queue()
        self.receiver = KVReceiver(
            self.transport, self.slots, epoch=epoch, on_arrival=self.arrivals.put
        )

    def peer(self, writer: str = PREFILL) -> PeerEndpoint:
        """What a handshake of ``writer`` answers."""
        return PeerEndpoint(
            peer=self.name,
            endpoint=self.transport.endpoint(writer),
            kv_region_bytes=len(self.pool.memory),
            metadata_region_bytes=self.slots.nbytes,
            fence_generation=self.transport.fence_generation,
        )

    def reserve(
        self,
        request_id: str,
        block_ids: Sequence[int],
        *,
        nonce: int = 7,
        num_parts: int = 1,
        timeout_s: float = TIMEOUT_S,
    ) -> SendTicket:
        return SendTicket(
            request_id=request_id,
            nonce=nonce,
            epoch=self.epoch,
            block_ids=tuple(block_ids),
            slot=self.receiver.expect(request_id, nonce, num_parts),
            timeout_s=timeout_s,
            fence_generation=self.transport.fence_generation,
        )

    def arrival(self, timeout_s: float = TIMEOUT_S) -> Arrival:
        return self.arrivals.get(timeout=timeout_s)

    def close(self) -> None:
        self.receiver.close()
        self.transport.close()


class PrefillSide:
    """A prefill rank: random pool and sender; reports end up in a queue."""

    def __init__(
        self,
        *,
        part: int = 0,
        num_parts: int = 1,
        pool: Pool | None = None,
        wrap: Callable[[Transport], Transport] | None = None,
        num_threads: int = 2,
        options: LaneOptions | None = None,
        transport: str = "loopback",
        transport_options: TransportOptions | None = None,
        epoch: int = PREFILL_EPOCH,
    ) -> None:
        if pool is None:
            pool = Pool(32)
            pool.fill_random()
        self.pool = pool
        self.name = peer_name("prefill-0", epoch, part)
        inner = create_transport(
            transport, local_name=self.name, host=HOST, options=transport_options
        )
        self.transport = wrap(inner) if wrap else inner
        self.transport.register(pool.region())
        self.reports: queue.Queue[SendReport] = queue.Queue()
        self.part = part
        self.sender = KVSender(
            self.transport,
            pool.layout,
            SLOT_LAYOUT,
            kv_region=pool.region(),
            on_closed=self.reports.put,
            part=part,
            num_parts=num_parts,
            num_threads=num_threads,
            options=options,
        )

    def send(self, ticket: SendTicket, peer: PeerEndpoint, src_block_ids: Sequence[int]) -> None:
        """A whole hand-over: open, one push, finish."""
        self.sender.open(ticket, peer)
        self.sender.push(ticket.nonce, src_block_ids, 0)
        self.sender.finish(ticket.nonce, record_of(ticket) if self.part == 0 else None)

    def report(self, timeout_s: float = TIMEOUT_S) -> SendReport:
        return self.reports.get(timeout=timeout_s)

    def close(self) -> None:
        self.sender.close()
        self.transport.close()


def record_of(ticket: SendTicket, first_token: int = 42) -> MetadataRecord:
    return MetadataRecord(nonce=ticket.nonce, epoch=ticket.epoch, first_token=first_token)


def random_ids(count: int, num_blocks: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(num_blocks), count)
