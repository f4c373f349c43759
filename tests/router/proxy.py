"""A way to a worker that can be cut while both ends live."""

from __future__ import annotations

import asyncio
import contextlib


class Proxy:
    """Forwards TCP connections to a worker, and cuts them."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, target: int) -> int:
        """Returns the port that stands for ``target``."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", target)
            self._writers |= {writer, other_writer}
            await asyncio.gather(self._copy(reader, other_writer), self._copy(other_reader, writer))

        self._server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()
