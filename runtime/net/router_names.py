"""Where the routers are that a worker registers at: addresses, or names that stand for several.

``host:port`` is one router. ``dns+host:port`` stands for all addresses that the host name resolves
to, looked up again every few seconds, as with a headless service of Kubernetes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from dataclasses import dataclass

from runtime.logging import get_logger
from runtime.net.credentials import join_address

logger = get_logger(__name__)

PREFIX = "dns+"
RESOLVE_S = 5.0
NUM_MISSES = 3
"""An address is gone when so many answers in a row lack it: one answer may be incomplete."""

Resolve = Callable[[str, int], Awaitable[Collection[str]]]
"""The "host:port" of all addresses of a host; OSError where nobody can say."""


@dataclass(frozen=True, slots=True)
class RouterAt:
    """One router."""

    address: str
    """"host:port"."""
    name: str = ""
    """What its certificate is for, where that is not the address."""


@dataclass(frozen=True, slots=True)
class RouterName:
    """A name that stands for any number of routers."""

    host: str
    port: int


def parse_routers(routers: str) -> list[RouterAt | RouterName]:
    """A comma list, as on a worker's command line.

    Raises:
        ValueError: an entry is no address and no name.
    """
    found: list[RouterAt | RouterName] = []
    for entry in filter(None, (part.strip() for part in routers.split(","))):
        host, _, port = entry.removeprefix(PREFIX).rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"{entry!r} is no host:port and no {PREFIX}host:port")
        is_name = entry.startswith(PREFIX)
        found.append(RouterName(host.strip("[]"), int(port)) if is_name else RouterAt(entry))
    if not found:
        raise ValueError(f"{routers!r} names no router: host:port, or {PREFIX}host:port")
    return found


async def resolve_host(host: str, port: int) -> Collection[str]:
    """By the system's resolver, on a thread."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {join_address(str(address[0]), port) for *_, address in found}


async def follow(name: RouterName, resolve: Resolve) -> AsyncGenerator[Collection[RouterAt], None]:
    """The routers that ``name`` stands for, after every look; without end.

    While nobody can say, those of before are.
    """
    misses: dict[str, int] = {}
    trouble = ""
    while True:
        try:
            answer = await resolve(name.host, name.port)
        except OSError as error:
            if str(error) != trouble:
                trouble = str(error)
                logger.warning("cannot look up routers host=%s reason=%s", name.host, trouble)
        else:
            trouble = ""
            misses = {address: number + 1 for address, number in misses.items()}
            misses |= dict.fromkeys(answer, 0)
            misses = {a: number for a, number in misses.items() if number < NUM_MISSES}
        yield [RouterAt(address, name.host) for address in misses]
        await asyncio.sleep(RESOLVE_S)
