"""The least router: what comes in goes to one worker, and back. ``pipe.py PORT WORKER_URL``."""

from __future__ import annotations

import asyncio
import sys
from urllib.parse import urlsplit


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
    writer.close()


async def _serve(port: int, worker: str) -> None:
    address = urlsplit(worker)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(address.hostname, address.port)
        await asyncio.gather(_pass_on(reader, there[1]), _pass_on(there[0], writer))

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2]))
