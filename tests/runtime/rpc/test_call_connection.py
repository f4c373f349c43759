"""Messages are cut out of whatever pieces come, and silence ends a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from runtime.rpc import call_connection
from runtime.rpc.call_connection import CallConnection

MAX_BYTES = 1000


class Owner:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.reason = ""
        self.over = asyncio.Event()

    def opened(self, connection: CallConnection) -> None:
        self.connection = connection

    def take(self, message: bytes) -> None:
        self.messages.append(message)

    def writable(self) -> None:
        pass

    def lost(self, reason: str) -> None:
        self.reason = reason
        self.over.set()


Ends = tuple[Owner, asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    """A connection's owner, and the raw other end."""
    owner = Owner()
    server = await asyncio.get_running_loop().create_server(
        lambda: CallConnection(owner, MAX_BYTES), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    yield owner, reader, writer
    writer.close()
    server.close()
    async with asyncio.timeout(60):
        await owner.over.wait()


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "little") + message


@pytest.mark.parametrize("piece", [1, 3, 7, 10_000])
async def test_messages_come_whole_in_whatever_pieces(ends: Ends, piece: int) -> None:
    owner, _, writer = ends
    while not hasattr(owner, "connection"):
        await asyncio.sleep(0)
    messages = [b"a", b"b" * MAX_BYTES, b"", b"c" * 30]
    data = b"".join(framed(message) for message in messages)
    for begin in range(0, len(data), piece):
        owner.connection.data_received(data[begin : begin + piece])
    assert owner.messages == [message for message in messages if message]
    writer.write(framed(b"last"))
    async with asyncio.timeout(60):
        while owner.messages[-1] != b"last":
            await asyncio.sleep(0.005)


async def test_a_message_beyond_the_limit_ends_the_connection(ends: Ends) -> None:
    owner, _, writer = ends
    writer.write(framed(b"a") + (MAX_BYTES + 1).to_bytes(4, "little"))
    async with asyncio.timeout(60):
        await owner.over.wait()
    assert owner.messages == [b"a"]
    assert owner.reason == f"a message of {MAX_BYTES + 1} bytes is longer than {MAX_BYTES}"


async def test_a_peer_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_connection, "PING_S", 0.02)
    owner, heard = Owner(), b""

    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        heard = await reader.read(100)
        await owner.over.wait()
        writer.close()

    server = await asyncio.start_server(be_silent, "127.0.0.1", 0)
    loop, (host, port) = asyncio.get_running_loop(), server.sockets[0].getsockname()
    await loop.create_connection(lambda: CallConnection(owner, MAX_BYTES), host, port)
    async with asyncio.timeout(60):
        await owner.over.wait()
    assert "nothing came from the peer" in owner.reason
    assert heard[:4] == bytes(4)
    server.close()


async def test_peers_that_have_nothing_to_say_stay_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_connection, "PING_S", 0.02)
    here, there = Owner(), Owner()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: CallConnection(there, MAX_BYTES), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    await loop.create_connection(lambda: CallConnection(here, MAX_BYTES), host, port)
    num_pings = 0
    ping = CallConnection._ping

    def counted(connection: CallConnection) -> None:
        nonlocal num_pings
        num_pings += 1
        ping(connection)

    monkeypatch.setattr(CallConnection, "_ping", counted)
    async with asyncio.timeout(60):
        while num_pings < 20:
            await asyncio.sleep(0.01)
    assert not here.over.is_set()
    here.connection.send(b"hello")
    async with asyncio.timeout(60):
        while there.messages != [b"hello"]:
            await asyncio.sleep(0.005)
    here.connection.abort("done")
    async with asyncio.timeout(60):
        await asyncio.gather(here.over.wait(), there.over.wait())
    server.close()
