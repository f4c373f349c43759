"""The paired transports in one process, with each library: integrity, admission, fence, restart."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from kv_transfer.ticket import SendOutcome
from kv_transfer.transport import (
    KV_REGION,
    MemoryRegion,
    PeerHandle,
    RegionWrite,
    TransferHandle,
    TransferState,
    Transport,
)
from kv_transfer.transports import create_transport
from kv_transfer.transports.hello import WireError
from kv_transfer.transports.paired.endpoint import PairedEndpoint
from kv_transfer.transports.paired.engine import EngineError, EngineWrite, WriteEngine
from kv_transfer.transports.paired.frames import FrameKind, Offer, receive_frame
from kv_transfer.transports.paired.identity import ProcessIdentity
from kv_transfer.transports.paired.outgoing import OutgoingPeer, QueuedPost
from kv_transfer.transports.post_table import PostTable
from runtime.errors import PeerLostError, StaleTicketError, TransferFailedError
from tests.kv_transfer.helpers import (
    HOST,
    LAYOUT,
    TIMEOUT_S,
    DecodeSide,
    Pool,
    PrefillSide,
    random_ids,
)
from tests.kv_transfer.libraries import LIBRARIES, library, skip_unless_loaded
from tests.waiting import wait_until

__all__ = ["library"]

MakeTransport = Callable[[str], Transport]
BLOCK = LAYOUT.block_bytes


@pytest.fixture
def make(library: str, _no_thread_left: None) -> Iterator[MakeTransport]:
    made: list[Transport] = []

    def make_transport(name: str) -> Transport:
        made.append(create_transport(library, local_name=name, host=HOST))
        return made[-1]

    yield make_transport
    for transport in made:
        transport.close()


class Pair:
    """A writer and the memory that it writes."""

    def __init__(self, make: MakeTransport) -> None:
        self.source, self.target = Pool(64), Pool(64)
        self.source.fill_random()
        self.writer, self.reader = make("writer"), make("reader")
        self.writer.register(self.source.region())
        self.reader.register(self.target.region())
        self.peer = self.writer.connect("reader", self.reader.endpoint("writer"))

    def write(self, src: int, dst: int, count: int = 1) -> RegionWrite:
        return RegionWrite(KV_REGION, self.source.address + src * BLOCK, dst * BLOCK, count * BLOCK)

    def finished(self, handle: TransferHandle) -> TransferState:
        wait_until(lambda: self.writer.poll(handle) is not TransferState.PENDING)
        return self.writer.poll(handle)


@pytest.fixture
def pair(make: MakeTransport) -> Pair:
    return Pair(make)


def test_posts_in_flight_land_where_they_should(pair: Pair) -> None:
    src, dst = random_ids(64, 64, 1), random_ids(64, 64, 2)
    moves = list(zip(src, dst, strict=True))
    handles = [
        pair.writer.post(pair.peer, [pair.write(*move) for move in moves[i : i + 8]])
        for i in range(0, 64, 8)
    ]
    for handle in handles:
        assert pair.finished(handle) is TransferState.DONE
        pair.writer.release(handle)
    for s, d in moves:
        assert pair.target.block(d) == pair.source.block(s)


def test_a_notification_comes_after_the_bytes_and_wakes(pair: Pair) -> None:
    seen: list[bytes] = []

    def look() -> None:
        if pair.reader.notifications() == [("writer", b"hello")]:
            seen.append(pair.target.block(5))

    pair.reader.add_listener(look)
    handle = pair.writer.post(pair.peer, [pair.write(9, 5)], b"hello")
    assert pair.finished(handle) is TransferState.DONE
    wait_until(lambda: bool(seen))
    assert seen == [pair.source.block(9)]


def test_a_write_out_of_bounds_is_refused_and_the_connection_lives(pair: Pair) -> None:
    for bad in (
        RegionWrite(KV_REGION, pair.source.address, 64 * BLOCK - 1, 2),
        RegionWrite("nowhere", pair.source.address, 0, 2),
    ):
        handle = pair.writer.post(pair.peer, [bad])
        assert pair.writer.poll(handle) is TransferState.FAILED
        assert isinstance(pair.writer.error(handle), TransferFailedError)
    with pytest.raises(ValueError, match="not registered"):
        pair.writer.post(pair.peer, [RegionWrite(KV_REGION, 4096, 0, 2)])
    assert pair.finished(pair.writer.post(pair.peer, [pair.write(1, 1)])) is TransferState.DONE
    assert pair.target.block(1) == pair.source.block(1)


def test_memory_registered_after_the_connection_can_be_sent(pair: Pair) -> None:
    late = Pool(1)
    late.fill_random()
    pair.writer.register(MemoryRegion("late", late.address, BLOCK))
    handle = pair.writer.post(pair.peer, [RegionWrite(KV_REGION, late.address, 0, BLOCK)])
    assert pair.finished(handle) is TransferState.DONE
    assert pair.target.block(0) == late.block(0)
    pair.writer.deregister("late")
    with pytest.raises(ValueError, match="not registered"):
        pair.writer.post(pair.peer, [RegionWrite(KV_REGION, late.address, 0, BLOCK)])


def test_a_wrong_token_is_refused(pair: Pair) -> None:
    values = json.loads(pair.reader.endpoint("writer"))
    values["token"] = "00" * 32
    with pytest.raises(StaleTicketError, match="token"):
        pair.writer.connect("reader", json.dumps(values).encode())
    with pytest.raises(StaleTicketError, match="token for this name"):
        pair.writer.connect("reader", pair.reader.endpoint("somebody else"))


def test_an_endpoint_that_is_none(pair: Pair) -> None:
    for data in (b"", b"{}", b"\xff", b"[1]"):
        with pytest.raises(TransferFailedError, match="not a paired endpoint"):
            pair.writer.connect("reader", data)


def test_another_library_is_refused_before_anything_is_sent(pair: Pair) -> None:
    values = json.loads(pair.reader.endpoint("writer"))
    values["library"] = "pigeon"
    with pytest.raises(TransferFailedError, match="speaks 'pigeon'"):
        pair.writer.connect("reader", json.dumps(values).encode())


def test_a_peer_that_restarted_on_the_address_is_stale(pair: Pair, make: MakeTransport) -> None:
    """The address answers, with another epoch in its name and another token key."""
    reborn = make("reader-2")
    values = json.loads(pair.reader.endpoint("writer"))
    values["port"] = PairedEndpoint.decode(reborn.endpoint("writer")).port
    with pytest.raises(StaleTicketError, match="another process"):
        pair.writer.connect("reader", json.dumps(values).encode())
    with pytest.raises(StaleTicketError, match="is of reader-2"):
        pair.writer.connect("reader", reborn.endpoint("writer"))


def test_nobody_answers(pair: Pair) -> None:
    endpoint = pair.reader.endpoint("writer")
    pair.reader.close()
    with pytest.raises(PeerLostError):
        pair.writer.connect("reader", endpoint)


def test_a_fence_voids_endpoint_and_connection_of_one_peer(pair: Pair, make: MakeTransport) -> None:
    other_pool = Pool(1)
    other_pool.fill_random()
    other = make("other")
    other.register(other_pool.region())
    other_peer = other.connect("reader", pair.reader.endpoint("other"))
    old = pair.reader.endpoint("writer")
    pair.reader.fence("writer")
    assert pair.reader.fence_generation == 1
    pair.target.memory[:] = bytes(len(pair.target.memory))
    handle = pair.writer.post(pair.peer, [pair.write(0, 0, 64)])
    assert pair.finished(handle) is TransferState.FAILED
    assert isinstance(pair.writer.error(handle), PeerLostError)
    assert not pair.writer.is_connected(pair.peer)
    assert pair.target.is_zero()
    with pytest.raises(StaleTicketError, match="before a fence"):
        pair.writer.connect("reader", old)

    write = RegionWrite(KV_REGION, other_pool.address, 3 * BLOCK, BLOCK)
    handle = other.post(other_peer, [write])
    wait_until(lambda: other.poll(handle) is TransferState.DONE)
    assert pair.target.block(3) == other_pool.block(0)
    peer = pair.writer.connect("reader", pair.reader.endpoint("writer"))
    assert pair.finished(pair.writer.post(peer, [pair.write(7, 7)])) is TransferState.DONE
    assert pair.target.block(7) == pair.source.block(7)


def test_deregister_ends_the_writers_of_a_region(pair: Pair) -> None:
    pair.reader.deregister(KV_REGION)
    handle = pair.writer.post(pair.peer, [pair.write(0, 0)])
    assert pair.finished(handle) is TransferState.FAILED
    assert pair.target.is_zero()


def test_disconnect_fails_what_is_pending(pair: Pair) -> None:
    handles = [pair.writer.post(pair.peer, [pair.write(0, 0, 64)]) for _ in range(4)]
    pair.writer.disconnect(pair.peer)
    assert all(pair.writer.poll(handle) is not TransferState.PENDING for handle in handles)
    late = pair.writer.post(pair.peer, [pair.write(0, 0)])
    assert pair.writer.poll(late) is TransferState.FAILED


def test_instances_of_the_library_go_with_their_connections(
    make: MakeTransport, library: str
) -> None:
    """No thread and no descriptor is left by connections that come and go."""

    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    pair = Pair(make)
    pair.writer.disconnect(pair.peer)
    before = counts()
    for _ in range(3 if library == "mooncake" else 8):
        peer = pair.writer.connect("reader", pair.reader.endpoint("writer"))
        assert pair.finished(pair.writer.post(peer, [pair.write(1, 1)])) is TransferState.DONE
        pair.writer.disconnect(peer)

    def is_back() -> bool:
        return all(now <= then + 2 for now, then in zip(counts(), before, strict=True))

    wait_until(is_back)


@pytest.mark.parametrize("name", LIBRARIES)
def test_hand_overs_in_sender_and_receiver(name: str) -> None:
    skip_unless_loaded(name)
    decode, prefill = DecodeSide(transport=name), PrefillSide(transport=name)
    try:
        for nonce in range(1, 6):
            src, dst = random_ids(9, 32, nonce), random_ids(9, 32, 50 + nonce)
            ticket = decode.reserve(f"r{nonce}", dst, nonce=nonce)
            prefill.send(ticket, decode.peer(), src)
            arrival = decode.arrival()
            assert arrival.error is None
            assert prefill.report().outcome is SendOutcome.SENT
            assert [decode.pool.block(d) for d in dst] == [prefill.pool.block(s) for s in src]
            decode.slots.free(arrival.slot)
        decode.slots.check_integrity()
    finally:
        prefill.close()
        decode.close()


def test_frames_and_offers_refuse_what_is_none() -> None:
    offer = Offer("x", b"\1\2", (MemoryRegion("kv", 1, 2, device=0, scratch_bytes=3),))
    assert Offer.decode(offer.encode()) == offer
    for data in (b"", b"{}", b'{"library": 1, "address": "zz", "regions": []}'):
        with pytest.raises(ConnectionError):
            Offer.decode(data)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff\0\0\0\0")
        with pytest.raises(ConnectionError, match="kind 255"):
            receive_frame(ours)
        theirs.sendall(bytes([FrameKind.NOTIFY]) + b"\xff\xff\xff\xff")
        with pytest.raises(ConnectionError, match="bytes"):
            receive_frame(ours)


def test_a_process_is_gone_only_when_it_is() -> None:
    us = ProcessIdentity.of_this_process()
    assert ProcessIdentity.decode(us.encode()) == us
    assert not us.is_gone(us)
    process = subprocess.Popen(["sleep", "30"])
    start = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    who = ProcessIdentity(us.boot_id, us.pid_namespace, process.pid, start)
    assert not who.is_gone(us)
    process.kill()
    wait_until(lambda: who.is_gone(us))  # a zombie is gone too
    process.wait()
    assert who.is_gone(us)
    elsewhere = ProcessIdentity("another boot", us.pid_namespace, process.pid, start)
    assert not elsewhere.is_gone(us)
    with pytest.raises(ConnectionError):
        ProcessIdentity.decode(b"{}")


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "data",
    [DEEP, b'{"library": "n", "address": "", "regions": [["kv", 1e999, 1, null, 0]]}'],
    ids=["deep", "infinite"],
)
def test_an_offer_that_is_none_ends_the_connection(data: bytes) -> None:
    with pytest.raises(WireError, match="not an offer"):
        Offer.decode(data)


@pytest.mark.parametrize(
    "data",
    [DEEP, b'{"boot_id": "", "pid_namespace": "", "pid": 1e999, "start_time": 1}'],
    ids=["deep", "infinite"],
)
def test_an_identity_that_is_none_ends_the_connection(data: bytes) -> None:
    with pytest.raises(WireError, match="not a process identity"):
        ProcessIdentity.decode(data)


@pytest.mark.parametrize(
    "data",
    [DEEP, b'{"token":"","library":"","name":"","host":"","port":1e999,"generation":1}'],
    ids=["deep", "infinite"],
)
def test_an_endpoint_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(TransferFailedError, match="not a paired endpoint"):
        PairedEndpoint.decode(data)


class DyingEngine:
    """Its peer is gone: each start fails, once it may."""

    def __init__(self) -> None:
        self.num_starts = 0
        self.may_fail = threading.Event()

    def start(self, writes: Sequence[EngineWrite]) -> object:
        self.num_starts += 1
        assert self.may_fail.wait(TIMEOUT_S)
        raise EngineError("the process is gone")

    def close(self) -> None:
        """Nothing is under way."""


def test_every_post_fails_that_was_being_started_when_the_peer_died() -> None:
    """A small one by its caller and a large one by the drive thread: they have no place to lose."""
    ours, theirs = socket.socketpair()
    engine, posts = DyingEngine(), PostTable()
    connection = OutgoingPeer(
        ours,
        PeerHandle("decode-0@1/0", 1),
        cast(WriteEngine, engine),
        posts,
        regions={},
        on_event=lambda: None,
    )
    small, large = (QueuedPost(posts.start(), [write_of(n)], None) for n in (1, 1 << 20))
    caller = threading.Thread(target=connection.post, args=(small,))
    caller.start()
    wait_until(lambda: engine.num_starts == 1)
    connection.post(large)
    wait_until(lambda: not connection._queue)  # the drive thread has it, and waits for its turn
    engine.may_fail.set()
    caller.join()
    connection.close()
    theirs.close()
    assert engine.num_starts == 2
    for post in (small, large):
        assert posts.state(post.post_id) is TransferState.FAILED


def write_of(nbytes: int) -> EngineWrite:
    return EngineWrite(0, 0, nbytes, None, None)
