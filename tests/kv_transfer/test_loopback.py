"""The loopback transport by itself: integrity, order, refusals, tokens, the fence."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kv_transfer.layout import KVLayout
from kv_transfer.transport import (
    KV_REGION,
    MemoryRegion,
    PeerHandle,
    RegionWrite,
    TransferState,
    Transport,
    peer_name,
)
from kv_transfer.transports import create_transport
from kv_transfer.transports.gate import token_of
from kv_transfer.transports.loopback.endpoint import LoopbackEndpoint
from runtime.errors import (
    ConfigError,
    PeerLostError,
    StaleTicketError,
    TandemError,
    TransferFailedError,
)
from tests.kv_transfer.helpers import HOST, LAYOUT, Pool, random_ids
from tests.waiting import wait_until

MakeTransport = Callable[[str], Transport]


@pytest.fixture
def make() -> Iterator[MakeTransport]:
    made: list[Transport] = []

    def make_transport(name: str) -> Transport:
        made.append(create_transport("loopback", local_name=name, host=HOST))
        return made[-1]

    yield make_transport
    for transport in made:
        transport.close()


class Pair:
    """A writer and the memory that it writes."""

    def __init__(self, make: MakeTransport, layout: KVLayout = LAYOUT) -> None:
        self.source, self.target = Pool(64, layout), Pool(64, layout)
        self.source.fill_random()
        self.writer, self.reader = make("writer"), make("reader")
        self.writer.register(self.source.region())
        self.reader.register(self.target.region())
        self.peer = self.connect()

    def connect(self) -> PeerHandle:
        return self.writer.connect("reader", self.reader.endpoint("writer"))

    def write(self, src: int, dst: int) -> RegionWrite:
        size = self.source.layout.block_bytes
        return RegionWrite(KV_REGION, self.source.address + src * size, dst * size, size)

    def run(self, writes: list[RegionWrite], notify: bytes | None = None) -> TandemError | None:
        """Post and wait; the error of a FAILED post."""
        handle = self.writer.post(self.peer, writes, notify)
        wait_until(lambda: self.writer.poll(handle) is not TransferState.PENDING)
        error = self.writer.error(handle)
        assert (self.writer.poll(handle) is TransferState.FAILED) == (error is not None)
        self.writer.release(handle)
        return error


@pytest.fixture
def pair(make: MakeTransport) -> Pair:
    return Pair(make)


def test_many_posts_in_flight_land_where_they_should(pair: Pair) -> None:
    dst = random_ids(64, 64, seed=1)
    handles = [
        pair.writer.post(pair.peer, [pair.write(src, dst[src]) for src in range(i, i + 4)])
        for i in range(0, 64, 4)
    ]
    for handle in handles:
        wait_until(lambda h=handle: pair.writer.poll(h) is TransferState.DONE)  # type: ignore[misc]
        pair.writer.release(handle)
    for src in range(64):
        assert pair.target.block(dst[src]) == pair.source.block(src)


def test_a_post_of_more_writes_than_one_system_call_takes(pair: Pair) -> None:
    writes = [RegionWrite(KV_REGION, pair.source.address + i * 3, i * 3, 3) for i in range(5000)]
    assert pair.run(writes) is None
    assert pair.target.memory[:15000] == pair.source.memory[:15000]


def test_a_notification_comes_after_the_bytes_and_wakes(pair: Pair) -> None:
    seen: list[tuple[str, bytes, bool]] = []
    heard = threading.Event()

    def listen() -> None:
        for peer, message in pair.reader.notifications():
            seen.append((peer, message, pair.target.block(9) == pair.source.block(5)))
            heard.set()

    pair.reader.add_listener(listen)
    assert pair.run([pair.write(5, 9)], b"landed") is None
    assert heard.wait(60)
    assert seen == [("writer", b"landed", True)]
    pair.reader.remove_listener(listen)
    assert pair.run([], b"") is None
    assert pair.reader.notifications() == [("writer", b"")]


def test_a_write_out_of_bounds_is_refused_whole_and_the_connection_lives(pair: Pair) -> None:
    size = pair.source.layout.block_bytes
    outside = pair.write(1, 0)._replace(dst_offset=len(pair.target.memory) - size + 1)
    error = pair.run([pair.write(0, 0), outside], b"never")
    assert isinstance(error, TransferFailedError)
    assert "outside of region 'kv'" in str(error)
    assert pair.target.is_zero()
    assert pair.reader.notifications() == []
    huge = pair.write(1, 0)._replace(dst_offset=2**64 - 1)
    assert isinstance(pair.run([huge]), TransferFailedError)
    assert pair.run([pair.write(2, 2)]) is None
    assert pair.target.block(2) == pair.source.block(2)


def test_unknown_regions_and_unregistered_sources(pair: Pair) -> None:
    error = pair.run([pair.write(0, 0)._replace(label="nowhere")])
    assert isinstance(error, TransferFailedError)
    with pytest.raises(ValueError, match="is not registered"):
        pair.writer.post(pair.peer, [pair.write(0, 0)._replace(src_address=4096)])
    pair.reader.deregister(KV_REGION)
    pair.peer = pair.writer.connect("reader", pair.reader.endpoint("writer"))
    assert isinstance(pair.run([pair.write(0, 0)]), TransferFailedError)


def test_a_region_of_before_deregister_cannot_be_written(pair: Pair) -> None:
    old_endpoint = pair.reader.endpoint("writer")
    pair.reader.deregister(KV_REGION)
    pair.reader.register(pair.target.region())
    pair.peer = pair.writer.connect("reader", old_endpoint)
    error = pair.run([pair.write(0, 0)])
    assert "no region has this access key" in str(error)
    assert pair.target.is_zero()


def test_regions_must_be_disjoint_and_labels_unique(pair: Pair) -> None:
    with pytest.raises(ValueError, match="registered already"):
        pair.reader.register(pair.target.region())
    overlapping = MemoryRegion("other", pair.target.address + 1, 8)
    with pytest.raises(ValueError, match="overlaps region 'kv'"):
        pair.reader.register(overlapping)
    with pytest.raises(ValueError, match="no memory"):
        pair.reader.register(MemoryRegion("empty", pair.source.address, 0))


def changed(endpoint: bytes, **values: object) -> bytes:
    return json.dumps({**json.loads(endpoint), **values}).encode()


def test_a_wrong_token_is_refused(pair: Pair) -> None:
    with pytest.raises(StaleTicketError, match="wrong connection token"):
        pair.writer.connect("reader", changed(pair.reader.endpoint("writer"), token="00" * 32))


def test_the_token_of_a_generation_cannot_be_used_for_another(pair: Pair) -> None:
    with pytest.raises(StaleTicketError, match="wrong connection token"):
        pair.writer.connect("reader", changed(pair.reader.endpoint("writer"), generation=1))


def test_tokens_differ_by_key_peer_and_generation() -> None:
    values = {token_of(key, p, g) for key in (b"a", b"b") for p in "pq" for g in (0, 1)}
    assert len(values) == 8


def test_a_token_is_good_for_the_peer_that_it_was_given_to(make: MakeTransport) -> None:
    reader = make("reader")
    endpoint = reader.endpoint(peer_name("prefill-0", 1, 0))
    for rank in (0, 3):  # the ranks of an instance share a handshake
        make(peer_name("prefill-0", 1, rank)).connect("reader", endpoint)
    for name in (peer_name("prefill-1", 1, 0), peer_name("prefill-0", 2, 0), "prefill-0", ""):
        with pytest.raises(StaleTicketError, match="wrong connection token for this name"):
            make(name).connect("reader", endpoint)


def test_a_fenced_peer_does_not_come_back_by_another_name(make: MakeTransport) -> None:
    reader, fenced, other = make("reader"), peer_name("p", 1, 0), peer_name("p", 2, 0)
    endpoint = reader.endpoint(fenced)
    reader.fence(fenced)
    for name in (fenced, other):
        with pytest.raises(StaleTicketError, match=r"before a fence|for this name"):
            make(name).connect("reader", endpoint)


def test_another_process_at_the_address_is_refused_as_stale(make: MakeTransport) -> None:
    writer, restarted = make("writer"), make("decode-0@2/0")
    endpoint = LoopbackEndpoint.decode(restarted.endpoint("writer"))
    old = replace(endpoint, name="decode-0@1/0").encode()
    with pytest.raises(StaleTicketError, match="another process answers"):
        writer.connect("decode-0@1/0", old)
    with pytest.raises(StaleTicketError, match="the endpoint is of"):
        writer.connect("decode-0@1/0", endpoint.encode())


def test_nobody_answers(make: MakeTransport) -> None:
    writer, reader = make("writer"), make("reader")
    endpoint = reader.endpoint("writer")
    reader.close()
    with pytest.raises(PeerLostError, match="no connection to"):
        writer.connect("reader", endpoint)


def test_an_endpoint_that_is_none(make: MakeTransport) -> None:
    infinite = b'{"regions": {"kv": ["", 1e999]}}'
    for data in (b"", b"{}", b"\xff", b'{"regions": 3}', b"[" * 100_000, infinite):
        with pytest.raises(TransferFailedError, match="not a loopback endpoint"):
            make("writer").connect("reader", data)


def test_garbage_on_the_port_is_dropped_and_others_are_served(pair: Pair) -> None:
    endpoint = LoopbackEndpoint.decode(pair.reader.endpoint("writer"))
    with socket.create_connection((endpoint.host, endpoint.port), timeout=60) as sock:
        sock.sendall(b"GET / HTTP/1.1".ljust(50))  # as long as a hello
        assert sock.recv(100) == b""
    assert pair.run([pair.write(3, 3)]) is None


def test_a_closed_peer_fails_its_pending_posts_at_once(pair: Pair) -> None:
    handles = [pair.writer.post(pair.peer, [pair.write(i, i) for i in range(64)]) for _ in "abc"]
    pair.reader.close()
    wait_until(lambda: not pair.writer.is_connected(pair.peer))
    final = (TransferState.DONE, TransferState.FAILED)
    for handle in handles:
        wait_until(lambda h=handle: pair.writer.poll(h) in final)  # type: ignore[misc]
        pair.writer.release(handle)
    assert isinstance(pair.run([pair.write(0, 0)]), PeerLostError)


def test_disconnect_fails_pending_posts_before_it_returns(pair: Pair) -> None:
    handle = pair.writer.post(pair.peer, [pair.write(i, i) for i in range(64)])
    pair.writer.disconnect(pair.peer)
    assert pair.writer.poll(handle) is not TransferState.PENDING
    pair.writer.disconnect(pair.peer)
    assert isinstance(pair.run([pair.write(0, 0)]), PeerLostError)


def test_fence_ends_the_peer_and_voids_its_endpoint(pair: Pair) -> None:
    old_endpoint = pair.reader.endpoint("writer")
    pair.reader.fence("writer")
    assert pair.reader.fence_generation == 1
    assert isinstance(pair.run([pair.write(0, 0)]), PeerLostError)
    with pytest.raises(StaleTicketError, match="before a fence"):
        pair.writer.connect("reader", old_endpoint)
    assert pair.target.is_zero()
    pair.peer = pair.connect()
    assert pair.run([pair.write(1, 1)]) is None


def test_fence_of_one_peer_leaves_the_others(pair: Pair, make: MakeTransport) -> None:
    endpoint = pair.reader.endpoint("third")
    pair.reader.fence("somebody else")
    assert pair.run([pair.write(1, 1)]) is None
    late = make("third")
    late.connect("reader", endpoint)


def test_nothing_lands_after_fence_returns(make: MakeTransport) -> None:
    """Fences in the middle of a stream of 32 MiB posts; the memory must not change after."""
    pair = Pair(make, replace(LAYOUT, block_size=2048))

    def write_on() -> None:
        while pair.run([pair.write(i, i) for i in range(64)]) is None:
            pass

    writing = threading.Thread(target=write_on)
    writing.start()
    wait_until(lambda: pair.target.block(30) == pair.source.block(30))
    pair.reader.fence("writer")
    pair.target.memory[:] = bytes(len(pair.target.memory))
    writing.join()
    assert pair.target.is_zero()


def test_a_silent_connection_does_not_block_close(make: MakeTransport) -> None:
    reader = make("reader")
    endpoint = LoopbackEndpoint.decode(reader.endpoint("writer"))
    with socket.create_connection((endpoint.host, endpoint.port), timeout=60):
        reader.close()
    reader.close()


def test_create_transport_names_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"kv_transfer.transport = 'pigeon'.*loopback"):
        create_transport("pigeon", local_name="x", host=HOST)
