"""Ranks that each have some of the heads fill a peer's blocks together, and nothing else of it."""

from __future__ import annotations

import dataclasses
import queue

from kv_transfer.layout import KVLayout
from kv_transfer.sender import KVSender
from kv_transfer.ticket import SendReport
from kv_transfer.transport import peer_name
from kv_transfer.transports import create_transport
from tests.kv_transfer.helpers import (
    HOST,
    LAYOUT,
    PREFILL_EPOCH,
    SLOT_LAYOUT,
    TIMEOUT_S,
    DecodeSide,
    Pool,
    random_ids,
    record_of,
)

NUM_PARTS = 2
WHOLE = dataclasses.replace(LAYOUT, num_heads=4)


def heads_of(block: bytes, layout: KVLayout, layer: int) -> list[bytes]:
    """The bytes of each head of a layer of a block."""
    tile = layout.layer_bytes // layout.num_heads
    start = layout.layer_offset(layer)
    return [block[start + h * tile : start + (h + 1) * tile] for h in range(layout.num_heads)]


def test_heads_of_two_ranks_meet_in_the_peer_s_blocks() -> None:
    own = WHOLE.of_part(NUM_PARTS)
    pools = [Pool(16, own) for _ in range(NUM_PARTS)]
    decode = DecodeSide(layout=WHOLE)
    src, dst = random_ids(7, 16, 1), random_ids(7, 32, 2)
    ticket = decode.reserve("r", dst, num_parts=NUM_PARTS)
    senders, transports = [], []
    reports: queue.Queue[SendReport] = queue.Queue()
    try:
        for part, pool in enumerate(pools):
            pool.fill_random()
            name = peer_name("prefill-0", PREFILL_EPOCH, part)
            transport = create_transport("loopback", local_name=name, host=HOST, options=None)
            transport.register(pool.region())
            sender = KVSender(
                transport,
                WHOLE,
                SLOT_LAYOUT,
                kv_region=pool.region(),
                on_closed=reports.put,
                part=part,
                num_parts=NUM_PARTS,
                splits_heads=True,
            )
            transports.append(transport)
            senders.append(sender)
            sender.open(ticket, decode.peer(name))
            # In layers, and from within the prompt: no part may shift by which blocks these are.
            sender.push(ticket.nonce, src[:3], 0, layers=(0, 1))
            sender.push(ticket.nonce, src[:3], 0, layers=(1, 3))
            sender.push(ticket.nonce, src[3:], 3)
            sender.finish(ticket.nonce, record_of(ticket) if part == 0 else None)
        decode.arrival()
        sent = [reports.get(timeout=TIMEOUT_S).num_bytes for _ in range(NUM_PARTS)]
        assert min(sent) > len(src) * own.block_bytes
        for source, target in zip(src, dst, strict=True):
            for layer in range(WHOLE.num_layers):
                expected = [h for p in pools for h in heads_of(p.block(source), own, layer)]
                assert heads_of(decode.pool.block(target), WHOLE, layer) == expected
        for other in set(range(32)) - set(dst):
            assert not any(decode.pool.block(other))
    finally:
        for sender in senders:
            sender.close()
        for transport in transports:
            transport.close()
        decode.close()
