"""Each layout of bytes that is our own, not protobuf's: a sample, and how a peer reads it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import NamedTuple, cast

from engine.memory.events import AllBlocksCleared, BlockRemoved, BlockStored
from kv_transfer import metadata
from kv_transfer.layout import KVDtype, KVLayout
from kv_transfer.metadata import MetadataRecord, SlotLayout
from kv_transfer.transport import MemoryRegion
from kv_transfer.transports import hello
from kv_transfer.transports.hello import Hello, HelloReader, Status
from kv_transfer.transports.loopback import wire
from kv_transfer.transports.loopback.endpoint import LoopbackEndpoint, RemoteRegion
from kv_transfer.transports.loopback.wire import PostHeader, WriteHeader
from kv_transfer.transports.paired import frames as paired
from kv_transfer.transports.paired.endpoint import PairedEndpoint
from kv_transfer.transports.paired.frames import FrameKind, Offer
from kv_transfer.transports.paired.identity import ProcessIdentity
from runtime.block_hash import hash_blocks
from runtime.rpc.call_connection import CallConnection, ConnectionOwner, greeting, read_greeting
from runtime.sampling import PositionLogprobs
from runtime.version import WIRE
from worker.cache_log import CacheEvents, CacheLog

SLOTS = SlotLayout(max_top_logprobs=2, mtp_hidden_bytes=8, max_parts=2)
HASHES = [bytes(range(start, start + 16)) for start in (0, 16)]


class Frame(NamedTuple):
    """``read`` makes ``value`` of ``data``; what nobody reads back is its own value."""

    data: bytes
    read: Callable[[bytes], object] = bytes
    value: object = None


def frames() -> dict[str, Frame]:
    """All of them, by name."""
    layout = KVLayout(
        dtype=KVDtype.BFLOAT16,
        block_size=64,
        num_layers=3,
        num_mtp_layers=1,
        num_heads=2,
        head_width=576,
    )
    events = _cache_events()
    blocks = b"".join(hash_blocks([1, 2, 2**31, 4], 2, salt="tenant"))
    return {
        "block_hashes": Frame(blocks, value=blocks),
        "cache_events": Frame(b"".join(events), _read_cache_events, events),
        "call_greeting": Frame(greeting("secret"), read_greeting, (WIRE, b"secret")),
        "call_messages": Frame(_call_bytes(b"first", b"second"), _messages, [b"first", b"second"]),
        "kv_layout": Frame(
            layout.describe().encode(), lambda data: KVLayout.parse(data.decode()), layout
        ),
        **_records(),
        **_handshakes(),
        **_loopback(),
        **_paired(),
    }


def _records() -> dict[str, Frame]:
    record = MetadataRecord(
        nonce=2**63 + 1,
        epoch=2**62 + 2,
        first_token=-3,
        logprobs=PositionLogprobs(-0.5, (7, 8), (-0.25, -4.0)),
        mtp_hidden=b"\xff hidden",
        first_draft=9,
    )
    flag = metadata.encode_flag(2**63 + 1, 2**62 + 2)
    notices = metadata.encode_slot_notices([1, 2**31])
    return {
        "kv_flag": Frame(flag, value=flag),
        "kv_record": Frame(
            metadata.encode_record(record, SLOTS),
            lambda data: metadata.decode_record(data, SLOTS),
            record,
        ),
        "kv_slot_notices": Frame(notices, metadata.decode_slot_notices, [1, 2**31]),
    }


def _handshakes() -> dict[str, Frame]:
    met = Hello(2**63 + 1, bytes(range(32)), "prefill-0/1", "decode-0/2")

    def read(data: bytes) -> Hello:
        return _received(data, HelloReader().read)

    return {
        "kv_hello": Frame(_sent(lambda sock: hello.send_hello(sock, met)), read, met),
        "kv_hello_reply": Frame(
            _sent(lambda sock: hello.send_reply(sock, Status.STALE, "fenced")),
            lambda data: _received(data, hello.receive_reply),
            (Status.STALE, "fenced"),
        ),
    }


def _loopback() -> dict[str, Frame]:
    post = PostHeader(2**63 + 1, [WriteHeader(HASHES[0], 2**40 + 1, 2**33)], b"slots")
    regions = {"kv": RemoteRegion(HASHES[1], 2**40)}
    endpoint = LoopbackEndpoint("decode-0", "::1", 4711, 3, bytes(range(32)), regions)
    return {
        "loopback_ack": Frame(
            _sent(lambda sock: wire.send_ack(sock, 2**63 + 1, Status.REFUSED, "no such region")),
            lambda data: _received(data, wire.receive_ack),
            (2**63 + 1, Status.REFUSED, "no such region"),
        ),
        "loopback_endpoint": Frame(endpoint.encode(), LoopbackEndpoint.decode, endpoint),
        "loopback_post": Frame(
            wire.encode_post(post), lambda data: _received(data, wire.receive_post), post
        ),
    }


def _paired() -> dict[str, Frame]:
    regions = (
        MemoryRegion("kv", 2**40, 2**33, device=1, scratch_bytes=64),
        MemoryRegion("metadata", 2**41, 4096),
    )
    offer = Offer("nixl", b"\xff address", regions)
    who = ProcessIdentity("boot", "pid:[4026531836]", 42, 123_456)
    endpoint = PairedEndpoint("nixl", "decode-0", "::1", 4711, 3, bytes(range(32)).hex())
    kinds = {
        f"paired_{kind.name.lower()}": Frame(
            _sent(lambda sock, kind=kind: paired.send_frame(sock, kind, b"")),
            lambda data: _received(data, paired.receive_frame),
            (kind, b""),
        )
        for kind in FrameKind
    }
    notify = FrameKind.NOTIFY, b"slots"
    return {
        **kinds,
        "paired_endpoint": Frame(endpoint.encode(), PairedEndpoint.decode, endpoint),
        "paired_identity": Frame(who.encode(), ProcessIdentity.decode, who),
        "paired_notify": Frame(
            _sent(lambda sock: paired.send_frame(sock, *notify)),
            lambda data: _received(data, paired.receive_frame),
            notify,
        ),
        "paired_offer_text": Frame(offer.encode(), Offer.decode, offer),
    }


def _sent(send: Callable[[socket.socket], None]) -> bytes:
    """What ``send`` writes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours)
        return theirs.recv(2**16)


def _received(data: bytes, receive: Callable[[socket.socket], object]) -> object:
    """What ``receive`` makes of ``data``, all of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        value = receive(theirs)
        assert theirs.recv(1) == b"", "it leaves some"
        return value


def _cache_events() -> CacheEvents:
    log = CacheLog()
    log.begin([])
    first = log.next_sequence
    log.put([BlockStored(HASHES[0]), BlockRemoved(HASHES[1]), AllBlocksCleared()])
    return log.since(first, 3)


def _read_cache_events(data: bytes) -> CacheEvents:
    num_events = len(data) // 17
    return CacheEvents(data[:num_events], data[num_events:])


class _Calls:
    """The transport beneath a connection of calls, and the owner above it."""

    def __init__(self) -> None:
        self.written = b""
        self.taken: list[bytes] = []

    def get_extra_info(self, name: str) -> socket.socket:
        return self._sock

    def write(self, data: bytes) -> None:
        self.written += data

    def opened(self, connection: CallConnection) -> None:
        """See `ConnectionOwner`."""

    def take(self, message: bytes) -> None:
        self.taken.append(message)

    def writable(self) -> None:
        """See `ConnectionOwner`."""

    def lost(self, reason: str) -> None:
        """See `ConnectionOwner`."""

    async def connection(self, use: Callable[[CallConnection], None]) -> None:
        connection = CallConnection(cast(ConnectionOwner, self), 2**16)
        with socket.socket() as self._sock:
            connection.connection_made(cast(asyncio.Transport, self))
            use(connection)
            connection.connection_lost(None)


def _call_bytes(*messages: bytes) -> bytes:
    """What a connection writes for them, and for a ping."""

    def send(connection: CallConnection) -> None:
        for message in messages:
            connection.send(message)
        connection._ping()

    calls = _Calls()
    asyncio.run(calls.connection(send))
    return calls.written


def _messages(data: bytes) -> list[bytes]:
    calls = _Calls()
    asyncio.run(calls.connection(lambda connection: connection.data_received(data)))
    return calls.taken
