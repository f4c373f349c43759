"""Clients that are slow, silent or many: each is cut off in time, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import aiohttp
import orjson
import pytest

from router.http.wire.connections import Connection, ConnectionLimits, Connections
from tests.router.conftest import MODEL, Cluster, StartRouter
from tests.waiting import until

COMPLETION = {"model": MODEL, "prompt": "hi", "ignore_eos": True, "max_tokens": 100}


async def connect(
    cluster: Cluster, text: bytes = b"", *, receive_buffer: int = 0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    address = ("127.0.0.1", cluster.service.http_port)
    await asyncio.get_running_loop().sock_connect(sock, address)
    limit = max(receive_buffer, 1024)
    reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
    writer.write(text)
    return reader, writer


def post(body: dict[str, object], *, num_missing: int = 0) -> bytes:
    data = orjson.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data[: len(data) - num_missing]


async def add_workers(cluster: Cluster) -> Cluster:
    await cluster.add_pair()
    return cluster


async def read_error(reader: asyncio.StreamReader) -> tuple[int, str]:
    async with asyncio.timeout(60):
        answer = await reader.read(-1)
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), orjson.loads(body)["error"]["code"]


@pytest.mark.parametrize("text", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Sl"])
async def test_a_stranger_that_sends_no_whole_headers_is_cut_off(
    start_router: StartRouter, text: bytes
) -> None:
    cluster = await start_router(header_timeout_s=0.2)
    reader, writer = await connect(cluster, text)
    assert await read_error(reader) == (408, "timeout")
    writer.close()


async def test_an_idle_connection_is_kept_until_the_next_headers_begin(
    start_router: StartRouter,
) -> None:
    cluster = await start_router(header_timeout_s=1.0)
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    reader, writer = await connect(cluster, request)
    assert b"200 OK" in await reader.readuntil(b"}")
    await asyncio.sleep(2.0)
    writer.write(request)
    assert b"200 OK" in await reader.readuntil(b"}")
    writer.write(request[:20])
    assert await read_error(reader) == (408, "timeout")
    writer.close()


async def test_a_router_that_drains_keeps_no_connection_for_a_further_request(
    start_router: StartRouter,
) -> None:
    cluster = await add_workers(await start_router())
    cluster.decode.step_s = 0.02
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    idle, idle_writer = await connect(cluster, request)
    assert b"200 OK" in await idle.readuntil(b"}")
    silent, silent_writer = await connect(cluster, b"")
    busy, busy_writer = await connect(
        cluster, post({"model": MODEL, "prompt": "x", "max_tokens": 8})
    )
    await until(lambda: len(cluster.prefill.seen) == 1)
    drain = asyncio.create_task(cluster.service.drain())
    async with asyncio.timeout(60):
        assert await idle.read() == b""
        assert b"200 OK" in await busy.read()
        silent_writer.write(post({"model": MODEL, "prompt": "x"}))
        assert await read_error(silent) == (503, "server_is_draining")
        await drain
    for writer in (idle_writer, silent_writer, busy_writer):
        writer.close()


async def test_a_body_that_does_not_come_is_given_up(start_router: StartRouter) -> None:
    cluster = await add_workers(await start_router(body_timeout_s=0.2))
    reader, writer = await connect(cluster, post(COMPLETION, num_missing=3))
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    assert b" 408 " in head
    writer.close()


async def test_unfinished_headers_do_not_keep_others_out(start_router: StartRouter) -> None:
    cluster = await start_router(max_connections=5)
    strangers = [await connect(cluster, b"GET / HTT") for _ in range(12)]
    async with aiohttp.ClientSession(cluster.url) as http:
        for _ in range(3):
            async with http.get("/health") as response:
                assert response.status == 200
    # The oldest were closed for the newer.
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            assert await strangers[0][0].read(100) == b""
    for _, writer in strangers:
        writer.close()


class FakeTransport(asyncio.Transport):
    """Records what is written and how it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


class FakeConnection:
    """As much of a connection as ``Connections`` knows."""

    def __init__(self) -> None:
        self.transport = FakeTransport()


def test_where_all_are_in_a_request_the_newest_is_refused(caplog) -> None:
    limits = ConnectionLimits(max_connections=2, header_timeout_s=1, stall_timeout_s=1)
    connections = Connections(limits, lambda: 0.0)
    busy: list[Connection] = [FakeConnection() for _ in range(2)]  # type: ignore[misc]
    for connection in busy:
        connections.opened(connection)
        connections.began(connection)
    late = FakeConnection()
    connections.opened(late)  # type: ignore[arg-type]
    assert late.transport.is_closed
    assert b"503" in late.transport.written
    assert b"router.max_connections" in late.transport.written
    assert "max_connections=2" in caplog.text
    connections.ended(busy[1])
    newer = FakeConnection()
    connections.opened(newer)  # type: ignore[arg-type]
    assert busy[1].transport.is_closed  # type: ignore[union-attr]
    assert not newer.transport.is_closed
    assert len(connections) == 2


async def test_clients_that_read_nothing_do_not_keep_their_places(
    start_router: StartRouter,
) -> None:
    cluster = await add_workers(
        await start_router(
            max_concurrent_requests=2, client_stall_timeout_s=0.5, max_mailbox_bytes=1 << 30
        )
    )
    # 32 choices with the most details are some megabytes, and sockets hold kilobytes.
    body = {**COMPLETION, "stream": True, "n": 32, "logprobs": 20, "max_tokens": 200}
    strangers = [await connect(cluster, post(body), receive_buffer=4096) for _ in range(2)]
    await until(lambda: len(cluster.decode.seen) > 2)
    async with (
        aiohttp.ClientSession(cluster.url, timeout=aiohttp.ClientTimeout(60)) as http,
        http.post("/v1/completions", json={**COMPLETION, "max_tokens": 2}) as response,
    ):
        assert response.status == 200
    for _, writer in strangers:
        writer.transport.abort()


async def test_a_mailbox_that_nobody_empties_ends_its_request(
    start_router: StartRouter, caplog
) -> None:
    cluster = await add_workers(await start_router(max_mailbox_bytes=200_000))
    body = {**COMPLETION, "stream": True, "n": 32, "logprobs": 20, "max_tokens": 200}
    _, writer = await connect(cluster, post(body), receive_buffer=4096)
    async with asyncio.timeout(60):
        while "router.max_mailbox_bytes" not in caplog.text:
            await asyncio.sleep(0.05)
    await until(lambda: not cluster.decode.requests)
    writer.transport.abort()


async def test_malformed_http_is_answered_in_the_form_of_errors(cluster: Cluster) -> None:
    reader, writer = await connect(cluster, b"this is not HTTP\r\n\r\n")
    assert await read_error(reader) == (400, "bad_http")
    writer.close()
