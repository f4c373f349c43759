"""Answers that write themselves: what stands on the wire, for each version and kind of body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from router.http.wire.connections import ConnectionLimits, Connections
from router.http.wire.reply import Reply

LIMITS = ConnectionLimits(max_connections=10, header_timeout_s=5.0, stall_timeout_s=5.0)
GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
HEADERS = {"Content-Type": "text/plain", "x-request-id": "seven"}
DATED = re.compile(rb"Date: [^\r]*GMT\r\nServer: [^\r]*\r\n")


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def connected(
    handler: Handler, *marks: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """To a server with ``handler`` at /."""
    app = web.Application()
    app.router.add_get("/", handler)
    app.on_response_prepare.extend(marks)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    loop = asyncio.get_running_loop()
    connections = Connections(LIMITS, loop.time)
    assert runner.server is not None
    server = await loop.create_server(connections.protocol_of(runner.server), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.close()
        server.close()
        await runner.cleanup()


async def asked(handler: Handler, request: bytes, *marks: Any, num_answers: int = 1) -> bytes:
    """All that is sent for ``request``, until it is done."""
    async with connected(handler, *marks) as (reader, writer):
        writer.write(request * num_answers)
        received = b""
        while received.count(b"x-request-id: seven") < num_answers or not is_whole(received):
            data = await reader.read(2**16)
            if not data:
                break
            received += data
    return DATED.sub(b"", received)


def is_whole(received: bytes) -> bool:
    return received.endswith((b"0\r\n\r\n", b"whole"))


async def stream(request: web.Request) -> web.StreamResponse:
    reply = Reply(HEADERS)
    await reply.prepare(request)
    await reply.write(b"one")
    await reply.write_eof(b"two")
    return reply


async def whole(request: web.Request) -> web.StreamResponse:
    return Reply(HEADERS, b"whole")


async def test_a_stream_is_chunks_behind_one_head() -> None:
    assert await asked(stream, GET) == (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nx-request-id: seven\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    )


async def test_a_body_has_its_length() -> None:
    assert await asked(whole, GET) == (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nx-request-id: seven\r\n"
        b"Content-Length: 5\r\n\r\nwhole"
    )


async def test_a_connection_takes_one_request_after_the_other() -> None:
    for handler in (stream, whole):
        received = await asked(handler, GET, num_answers=3)
        assert received.count(b"HTTP/1.1 200 OK\r\n") == 3


async def test_a_client_that_wants_the_end_gets_it() -> None:
    request = b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
    assert b"Connection: close\r\n" in await asked(whole, request)


async def test_an_old_client_gets_no_chunks_and_the_end_of_its_connection() -> None:
    request = b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    received = await asked(stream, request)
    assert received.startswith(b"HTTP/1.0 200 OK\r\n")
    assert received.endswith(b"\r\n\r\nonetwo")
    assert b"keep-alive" not in received
    assert b"Connection: keep-alive\r\n" in await asked(whole, request)


async def test_listeners_may_add_headers() -> None:
    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-marked"] = "yes"

    assert b"x-marked: yes\r\n" in await asked(whole, GET, mark)


async def test_a_header_with_a_line_break_is_none() -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        reply = Reply({"x-request-id": "one\r\nx-other: two"})
        with pytest.raises(ValueError, match="line break"):
            await reply.prepare(request)
        return await whole(request)

    assert b"x-other" not in await asked(broken, GET)


async def test_a_failure_behind_the_head_ends_the_connection() -> None:
    """A second answer within the first would be read as part of it."""

    async def failing(request: web.Request) -> web.StreamResponse:
        reply = Reply(HEADERS)
        await reply.prepare(request)
        await reply.write(b"one")
        raise RuntimeError("played")

    received = await asked(failing, GET)
    assert received.endswith(b"3\r\none\r\n")
    assert received.count(b"HTTP/1.1") == 1


async def test_the_end_waits_for_a_client_that_reads_slowly() -> None:
    size = 8 * 2**20
    is_taken = asyncio.Event()

    async def large(request: web.Request) -> web.StreamResponse:
        reply = Reply(HEADERS, b"x" * size)
        await reply.prepare(request)
        await reply.write_eof()
        is_taken.set()
        return reply

    async with connected(large) as (reader, writer):
        writer.write(GET)
        await asyncio.sleep(0.05)
        assert not is_taken.is_set()
        head = await reader.readuntil(b"\r\n\r\n")
        assert f"Content-Length: {size}".encode() in head
        assert await reader.readexactly(size) == b"x" * size
        await is_taken.wait()
