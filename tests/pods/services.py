"""How pods find one another: names (DNS), and the addresses of Services.

Services forward as kube-proxy does, a connection at a time to one of the pods that are ready. Names
of headless Services are the addresses of their pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tests.pods.manifests import Manifest, is_selected
from tests.pods.pod import Pod
from tests.pods.probes import port_of

_TTL_S = 1
_A, _ANY = 1, 255
_NO_NAME = 3


class NameServer(asyncio.DatagramProtocol):
    """Answers for A records; other kinds of a name that is known are empty."""

    def __init__(self, look_up: Callable[[str], list[str] | None]) -> None:
        """``look_up`` is asked in lower case; None: there is no such name."""
        self._look_up = look_up
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep where to answer."""
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Answer one query."""
        assert self._transport is not None
        with contextlib.suppress(IndexError, struct.error, UnicodeDecodeError):
            self._transport.sendto(self._answer(data), addr)

    def _answer(self, query: bytes) -> bytes:
        number, flags = struct.unpack_from("!HH", query)
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode())
            at += 1 + query[at]
        kind = struct.unpack_from("!H", query, at + 1)[0]
        found = self._look_up(".".join(labels).lower())
        addresses = list(found or ()) if kind in (_A, _ANY) else []
        random.shuffle(addresses)
        reply = 0x8400 | (flags & 0x0100) | (_NO_NAME if found is None else 0)
        header = struct.pack("!HHHHHH", number, reply, 1, len(addresses), 0, 0)
        records = [
            struct.pack("!HHHIH", 0xC00C, _A, 1, _TTL_S, 4) + socket.inet_aton(address)
            for address in addresses
        ]
        return header + query[12 : at + 5] + b"".join(records)


@dataclass(slots=True)
class RunningService:
    """One Service with an address of its own, or a headless one."""

    manifest: Manifest
    address: str
    """Empty: it is headless."""
    pods: Callable[[], Sequence[Pod]]
    _servers: list[asyncio.Server] = field(default_factory=list)
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.manifest["metadata"]["name"])

    def members(self) -> list[Pod]:
        """The pods that it stands for now."""
        spec = self.manifest["spec"]
        selected = [
            pod
            for pod in self.pods()
            if is_selected(pod.place.facts.labels, spec.get("selector") or {}) and not pod.is_gone
        ]
        if spec.get("publishNotReadyAddresses"):
            return selected
        return [pod for pod in selected if pod.is_ready]

    def names(self, domain: str) -> Mapping[str, list[str]]:
        """What its name and those of its pods stand for."""
        own = f"{self.name}.{domain}".lower()
        if self.address:
            return {own: [self.address]}
        members = self.members()
        names = {own: [pod.place.facts.ip for pod in members]}
        for pod in members:
            if pod.spec.get("subdomain") == self.name:
                names[f"{pod.place.hostname}.{own}".lower()] = [pod.place.facts.ip]
        return names

    async def start(self) -> None:
        """Listen at its address."""
        if not self.address:
            return
        for port in self.manifest["spec"]["ports"]:
            server = await asyncio.start_server(
                self._forwarder(port.get("targetPort", port["port"])), self.address, port["port"]
            )
            self._servers.append(server)

    async def close(self) -> None:
        """Listen no more, and cut what goes through."""
        for server in self._servers:
            server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _forwarder(
        self, target: int | str
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            try:
                await self._forward(target, reader, writer)
            except (OSError, asyncio.CancelledError):
                pass
            finally:
                self._connections.discard(task)
                writer.close()

        return forward

    async def _forward(
        self, target: int | str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        members = self.members()
        if not members:
            writer.transport.abort()  # refused, as without endpoints
            return
        pod = random.choice(members)
        containers = pod.spec["containers"]
        port = next(
            port_of(one, target)
            for one in containers
            if isinstance(target, int) or any(p.get("name") == target for p in one["ports"])
        )
        upstream = await asyncio.open_connection(pod.place.facts.ip, port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, upstream[1]))
                group.create_task(_pump(upstream[0], writer))
        except* OSError:
            pass
        finally:
            upstream[1].close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
