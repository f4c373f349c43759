"""Streams reach clients that are fast, slow, old or gone, whole and in order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import orjson
from aiohttp import web
from aiohttp.http import HttpVersion11

from router.http.wire.connections import ConnectionLimits, Connections
from router.http.wire.outbox import Connection, Outbox
from router.http.wire.outlet import Outlet
from tests.router.conftest import Cluster, StartRouter
from tests.router.http.test_connections import COMPLETION, add_workers, connect, post
from tests.waiting import until


class FakeTransport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closing = False
        self.is_broken = False

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True

    def write(self, data: bytes) -> None:
        if self.closing or self.is_broken:
            raise RuntimeError("closed")
        self.written.append(data)


class FakeConnection:
    def __init__(self, *, is_chunked: bool = False) -> None:
        self.transport: FakeTransport | None = FakeTransport()
        self.is_chunked = is_chunked


async def test_a_closed_connection_keeps_nobody_else_from_their_bytes() -> None:
    gone, closing, open_ = FakeConnection(), FakeConnection(), FakeConnection()
    outbox = Outbox()
    for word in (b"a", b"b"):
        for connection in (gone, closing, open_):
            outbox.add(cast(Connection, connection), word)
    gone.transport = None
    assert closing.transport is not None
    closing.transport.closing = True
    assert open_.transport is not None
    assert open_.transport.written == []
    await asyncio.sleep(0)
    assert open_.transport.written == [b"ab"]
    assert closing.transport.written == []
    outbox.add(cast(Connection, open_), b"c")
    outbox.flush()
    await asyncio.sleep(0)
    assert open_.transport.written == [b"ab", b"c"]


async def test_a_turn_of_one_connection_is_one_chunk() -> None:
    chunked, plain = FakeConnection(is_chunked=True), FakeConnection()
    outbox = Outbox()
    for word in (b"0123456789", b"abcdefgh"):
        for connection in (chunked, plain):
            outbox.add(cast(Connection, connection), word)
    await asyncio.sleep(0)
    assert chunked.transport is not None
    assert plain.transport is not None
    assert chunked.transport.written == [b"12\r\n0123456789abcdefgh\r\n"]
    assert plain.transport.written == [b"0123456789abcdefgh"]


async def test_what_is_taken_back_is_not_sent() -> None:
    ending, other = FakeConnection(), FakeConnection()
    outbox = Outbox()
    for connection in (ending, other):
        outbox.add(cast(Connection, connection), b"a")
        outbox.add(cast(Connection, connection), b"b")
    assert outbox.take_back(cast(Connection, ending)) == b"ab"
    assert outbox.take_back(cast(Connection, ending)) == b""
    outbox.flush()
    assert ending.transport is not None
    assert other.transport is not None
    assert (ending.transport.written, other.transport.written) == ([], [b"ab"])


async def test_a_connection_that_cannot_be_written_to_is_cut_off_alone() -> None:
    broken, open_ = FakeConnection(), FakeConnection()
    assert broken.transport is not None
    assert open_.transport is not None
    broken.transport.is_broken = True
    outbox = Outbox()
    for word in (b"a", b"b"):
        for connection in (broken, open_):
            outbox.add(cast(Connection, connection), word)
        await asyncio.sleep(0)
    assert open_.transport.written == [b"a", b"b"]
    assert broken.transport.closing


async def test_a_closed_outlet_takes_no_comment_behind_the_end_of_its_answer() -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response()

    limits = ConnectionLimits(max_connections=1, header_timeout_s=1.0, stall_timeout_s=1.0)
    connections = Connections(limits, lambda: 0.0)
    connection = connections.protocol_of(web.Server(answer))()
    request = SimpleNamespace(protocol=connection, version=HttpVersion11)
    outlet = Outlet(cast(web.Request, request))
    assert outlet.has_room
    connection.pause_writing()
    assert not outlet.has_room
    outlet.close()
    connection.resume_writing()
    assert not outlet.has_room


async def test_calls_come_before_the_bytes_and_one_that_fails_spoils_nothing() -> None:
    connection = FakeConnection()
    assert connection.transport is not None
    outbox, calls = Outbox(), []

    def fail() -> None:
        raise ValueError("of one stream")

    def say(word: bytes) -> None:
        outbox.add(cast(Connection, connection), word)

    def again() -> None:
        calls.append("first")
        outbox.call_soon(lambda: calls.append("second"))

    for call in (lambda: say(b"a"), fail, lambda: say(b"b"), again):
        outbox.call_soon(call)
    assert connection.transport.written == []
    await asyncio.sleep(0)
    assert connection.transport.written == [b"ab"]
    assert calls == ["first"]
    await asyncio.sleep(0)
    assert calls == ["first", "second"]
    say(b"c")
    await asyncio.sleep(0)
    assert connection.transport.written == [b"ab", b"c"]


def unchunked(data: bytes) -> bytes:
    parts = []
    while data != b"0\r\n\r\n":
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        parts.append(data[:length])
        assert data[length : length + 2] == b"\r\n"
        data = data[length + 2 :]
    return b"".join(parts)


def texts_of(events: bytes) -> dict[int, str]:
    *payloads, done, end = events.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    texts: dict[int, str] = {}
    for payload in payloads:
        if payload.startswith(b":"):
            continue  # a comment keeps the stream alive
        for choice in orjson.loads(payload.removeprefix(b"data: "))["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def last(body: dict[str, object]) -> bytes:
    """The only request of its connection."""
    return post(body).replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n")


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    async with asyncio.timeout(60):
        data = await reader.read(-1)
    head, _, body = data.partition(b"\r\n\r\n")
    assert b" 200 " in head
    return head, body


async def test_a_client_that_reads_late_gets_all_of_it(start_router: StartRouter) -> None:
    cluster = await add_workers(await start_router(keep_alive_s=0.05))
    # Some megabytes, and sockets hold kilobytes.
    body = {**COMPLETION, "stream": True, "n": 32, "logprobs": 20, "max_tokens": 100}
    reader, writer = await connect(cluster, last(body), receive_buffer=4096)
    await until(lambda: len(cluster.decode.seen) == 32 and not cluster.decode.requests)
    _, answer = await read_answer(reader)
    texts = texts_of(unchunked(answer))
    writer.close()
    quick_reader, quick_writer = await connect(cluster, last({**body, "logprobs": None}))
    _, quick = await read_answer(quick_reader)
    assert texts == texts_of(unchunked(quick))
    assert len(texts) == 32
    quick_writer.close()


async def test_a_client_of_http_1_0_gets_no_chunks(cluster: Cluster) -> None:
    text = last({**COMPLETION, "stream": True, "max_tokens": 10}).replace(b"HTTP/1.1", b"HTTP/1.0")
    reader, writer = await connect(cluster, text)
    head, body = await read_answer(reader)
    assert b"chunked" not in head.lower()
    assert texts_of(body)[0]
    writer.close()
