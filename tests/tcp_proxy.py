"""A way to a worker that can be slow, and be cut while both ends live."""

from __future__ import annotations

import asyncio
import contextlib


class Proxy:
    """Forwards TCP connections to ports of this machine, and cuts them.

    Args:
        delay_s: a connection is accepted at once, and answered after so many seconds.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, target: int) -> int:
        """Returns the port that stands for ``target``."""

        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._forward(target, reader, writer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            # Also of one that is cancelled before it began.
            task.add_done_callback(lambda _: writer.transport.abort())

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def cut(self) -> None:
        """End all connections at once, whatever is under way."""
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def close(self) -> None:
        """Stand for nothing any more."""
        for server in self._servers:
            server.close()
        await self.cut()

    async def _forward(
        self, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await asyncio.sleep(self._delay_s)
        with contextlib.suppress(OSError):
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", target)
            try:
                await asyncio.gather(_copy(reader, other_writer), _copy(other_reader, writer))
            finally:
                other_writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
        await writer.drain()
    writer.close()
