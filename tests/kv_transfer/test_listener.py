"""Strangers at a transport's port: they cost no thread, and never keep a peer out."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from deploy.ports import free_port
from kv_transfer.transport import KV_REGION, MemoryRegion, RegionWrite, TransferState, Transport
from kv_transfer.transports.gate import MAX_CONNECTIONS_PER_PEER
from kv_transfer.transports.hello import (
    MAX_NAME_BYTES,
    Hello,
    Status,
    receive_reply,
    send_hello,
)
from kv_transfer.transports.listener import MAX_STRANGERS, Listener
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.loopback.endpoint import LoopbackEndpoint
from kv_transfer.transports.paired.endpoint import PairedEndpoint
from kv_transfer.transports.paired.engine import (
    EngineError,
    EnginePost,
    EngineWrite,
    WriteEngine,
)
from kv_transfer.transports.paired.transport import PairedTransport
from runtime.errors import ConfigError, StaleTicketError
from runtime.version import WIRE
from tests.kv_transfer.helpers import HOST, LAYOUT, Pool
from tests.waiting import wait_until

NUM_STRANGERS = 1100
PREFIX = b"TDKV\1\0"  # how a hello begins


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4 * NUM_STRANGERS:
        pytest.skip(f"needs {4 * NUM_STRANGERS} open files, allowed are {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * NUM_STRANGERS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class MemoryEngine:
    """A library that reaches nobody: its posts are over at once."""

    def register(self, region: MemoryRegion) -> None: ...

    def deregister(self, region: MemoryRegion) -> None: ...

    def address(self) -> bytes:
        return b"nowhere"

    def attach(self, address: bytes) -> None:
        if address != b"nowhere":
            raise EngineError("no such address")

    def start(self, writes: Sequence[EngineWrite]) -> EnginePost:
        return object()

    def poll(self, post: EnginePost) -> bool:
        return True

    def release(self, post: EnginePost) -> None: ...

    def close(self) -> None: ...


class MemoryFactory:
    library = "none"
    bypasses_receiver = False

    def create(self, name: str) -> WriteEngine:
        return MemoryEngine()


def make_transport(kind: str, name: str, port: int = 0) -> Transport:
    if kind == "paired":
        return PairedTransport(MemoryFactory(), name, host=HOST, port=port)
    return LoopbackTransport(name, host=HOST, port=port)


KINDS = pytest.mark.parametrize("kind", ["loopback", "paired"])


class Pair:
    """A writer and the memory that it writes."""

    def __init__(self, kind: str, closing: ExitStack) -> None:
        self.source, self.target = Pool(4), Pool(4)
        self.source.fill_random()
        self.writer, self.reader = make_transport(kind, "writer"), make_transport(kind, "reader")
        closing.callback(self.reader.close)
        closing.callback(self.writer.close)
        self.writer.register(self.source.region())
        self.reader.register(self.target.region())
        self.kind = kind

    @property
    def address(self) -> tuple[str, int]:
        decode = PairedEndpoint.decode if self.kind == "paired" else LoopbackEndpoint.decode
        endpoint = decode(self.reader.endpoint("writer"))
        return endpoint.host, endpoint.port

    def transfers(self) -> bool:
        """Connect anew and write a block with a notification."""
        peer = self.writer.connect("reader", self.reader.endpoint("writer"))
        write = RegionWrite(KV_REGION, self.source.address, LAYOUT.block_bytes, LAYOUT.block_bytes)
        handle = self.writer.post(peer, [write], b"here")
        wait_until(lambda: self.writer.poll(handle) is not TransferState.PENDING)
        is_done = self.writer.poll(handle) is TransferState.DONE
        wait_until(lambda: self.reader.notifications() == [("writer", b"here")])
        self.writer.disconnect(peer)
        if self.kind == "loopback":
            return is_done and self.target.block(1) == self.source.block(0)
        return is_done


def connect(address: tuple[str, int], closing: ExitStack) -> socket.socket:
    return closing.enter_context(socket.create_connection(address, timeout=60))


def is_cut_off(sock: socket.socket) -> bool:
    """Waits for it."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@KINDS
@pytest.mark.usefixtures("many_files")
def test_silent_strangers_make_no_threads_and_keep_nobody_out(
    kind: str, closing: ExitStack
) -> None:
    pair = Pair(kind, closing)
    threads = set(threading.enumerate())
    address = pair.address
    strangers = [connect(address, closing) for _ in range(NUM_STRANGERS)]
    assert pair.transfers()
    assert is_cut_off(strangers[0])
    wait_until(lambda: set(threading.enumerate()) <= threads)
    assert pair.transfers()


@KINDS
def test_strangers_that_drip_make_no_threads_and_keep_nobody_out(
    kind: str, closing: ExitStack
) -> None:
    pair = Pair(kind, closing)
    threads = set(threading.enumerate())
    strangers = [connect(pair.address, closing) for _ in range(2 * MAX_STRANGERS)]
    for sent in range(len(PREFIX)):
        for stranger in strangers:
            try:
                stranger.sendall(PREFIX[sent : sent + 1])
            except OSError:
                continue  # cut off
        assert pair.transfers()
        time.sleep(0.1)
    wait_until(lambda: set(threading.enumerate()) <= threads)
    assert pair.transfers()


@KINDS
def test_it_listens_where_it_is_told_and_says_what_it_cannot(kind: str) -> None:
    port = free_port(HOST)
    make = PairedEndpoint.decode if kind == "paired" else LoopbackEndpoint.decode
    for _ in range(2):  # the second time right after the first
        transport = make_transport(kind, "reader", port)
        assert make(transport.endpoint("writer")).port == port
        with pytest.raises(ConfigError, match=f"--data-port = {port}: cannot listen"):
            make_transport(kind, "second", port)
        transport.close()


class Welcomes:
    """A listener that lets everybody in, or does what it is told to."""

    def __init__(self, closing: ExitStack, **options: float) -> None:
        self.closing = closing
        self.hellos: list[Hello] = []
        self.failures: list[Exception] = []
        self.listener = Listener(HOST, name="listener", welcome=self._welcome, **options)
        closing.callback(self.listener.close)

    def _welcome(self, sock: socket.socket, hello: Hello) -> str:
        if self.failures:
            raise self.failures.pop()
        self.closing.callback(sock.close)
        self.hellos.append(hello)
        return ""

    def connect(self) -> socket.socket:
        return connect(self.listener.address, self.closing)


def hello_of(sender: str) -> Hello:
    return Hello(0, bytes(32), sender, "reader")


def encoded(hello: Hello) -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_hello(ours, hello)
        return theirs.recv(1 << 16)


def test_the_limit_is_for_the_whole_hello(closing: ExitStack) -> None:
    """Each byte comes in time, and the hello would be whole after 20 s."""
    at = Welcomes(closing, hello_timeout_s=1.0)
    sock = at.connect()
    sock.settimeout(0.2)
    for byte in encoded(hello_of("dripping")):
        try:
            sock.sendall(bytes([byte]))
            assert sock.recv(1) == b""
            break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    else:
        pytest.fail("the hello was read to its end")
    assert at.listener.num_cut_off == 1
    assert not at.hellos


def test_a_hello_in_pieces_is_read(closing: ExitStack) -> None:
    at = Welcomes(closing)
    data = encoded(hello_of("in-pieces"))
    sock = at.connect()
    for start in range(0, len(data), 7):
        sock.sendall(data[start : start + 7])
        time.sleep(0.005)
    wait_until(lambda: at.hellos == [hello_of("in-pieces")])
    assert at.listener.num_strangers == 0


def test_what_follows_a_hello_is_left_in_the_socket(closing: ExitStack) -> None:
    followed: list[bytes] = []

    def welcome(sock: socket.socket, hello: Hello) -> str:
        with sock:
            followed.append(sock.recv(100))
        return ""

    listener = Listener(HOST, name="listener", welcome=welcome)
    closing.callback(listener.close)
    connect(listener.address, closing).sendall(encoded(hello_of("eager")) + b"post")
    wait_until(lambda: followed == [b"post"])


def test_one_stranger_more_costs_the_oldest_its_place(closing: ExitStack) -> None:
    at = Welcomes(closing, hello_timeout_s=60.0)
    strangers = [at.connect() for _ in range(MAX_STRANGERS)]
    wait_until(lambda: at.listener.num_strangers == MAX_STRANGERS)
    strangers += [at.connect(), at.connect()]
    assert is_cut_off(strangers[0])
    assert is_cut_off(strangers[1])
    assert at.listener.num_strangers == MAX_STRANGERS
    send_hello(strangers[2], hello_of("the oldest that is left"))
    wait_until(lambda: len(at.hellos) == 1)
    assert at.listener.num_cut_off == 2


def test_a_name_that_is_too_long_is_cut_off(closing: ExitStack) -> None:
    at = Welcomes(closing, hello_timeout_s=60.0)
    sock = at.connect()
    send_hello(sock, hello_of("n" * (MAX_NAME_BYTES + 1)))
    assert is_cut_off(sock)
    send_hello(at.connect(), hello_of("n" * MAX_NAME_BYTES))
    wait_until(lambda: len(at.hellos) == 1)


def test_who_speaks_another_version_of_it_is_told_so(closing: ExitStack) -> None:
    at = Welcomes(closing)
    hello = bytearray(encoded(hello_of("newer")))
    assert hello[4:6] == WIRE.to_bytes(2, "little")
    hello[4:6] = (WIRE + 1).to_bytes(2, "little")
    sock = at.connect()
    sock.sendall(hello)
    status, message = receive_reply(sock)
    assert status is Status.STALE
    assert f"speaks wire {WIRE + 1} " in message
    assert f"this process wire {WIRE} " in message
    assert at.hellos == []


def test_the_door_outlives_an_error_behind_it(
    closing: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    at = Welcomes(closing)
    at.failures.append(RuntimeError("no more threads"))
    sock = at.connect()
    send_hello(sock, hello_of("first"))
    assert b"cannot serve a connection" in sock.recv(1000)
    assert "no more threads" in caplog.text
    send_hello(at.connect(), hello_of("second"))
    wait_until(lambda: at.hellos == [hello_of("second")])


def test_closing_the_door_cuts_all_strangers_off(closing: ExitStack) -> None:
    at = Welcomes(closing)
    strangers = [at.connect() for _ in range(3)]
    at.listener.close()
    assert all(is_cut_off(stranger) for stranger in strangers)
    at.listener.close()


@KINDS
def test_one_peer_cannot_take_all_places(kind: str, closing: ExitStack) -> None:
    pair = Pair(kind, closing)
    for _ in range(MAX_CONNECTIONS_PER_PEER):
        pair.writer.connect("reader", pair.reader.endpoint("writer"))
    with pytest.raises(StaleTicketError, match="writer has 16 connections already"):
        pair.writer.connect("reader", pair.reader.endpoint("writer"))
    other = make_transport(kind, "other")
    closing.callback(other.close)
    other.register(Pool(1).region())
    other.connect("reader", pair.reader.endpoint("other"))
