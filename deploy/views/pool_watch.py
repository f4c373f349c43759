"""What the router says about the cluster: its readiness over HTTP, its pool over the registry.

Asks like any other client; the controller, ``tandem status`` and ``tandem drain`` use it. A router
that is not there yields an empty view, never an error: it may be starting or restarting.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deploy.clients.http_client import connect_http
from deploy.plan import Role
from runtime.net.credentials import Credentials

if TYPE_CHECKING:
    from runtime.pb.registry_pb2 import PoolSnapshot, WorkerRecord

_HTTP_TIMEOUT_S = 2.0
_RECONNECT_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMember:
    """One registered rank, with the load of its last renewal."""

    epoch: int
    role: Role
    address: str
    """Of its gRPC."""
    num_requests_running: int
    num_requests_waiting: int
    num_free_blocks: int
    num_total_blocks: int
    draining: bool


PoolMembers = Mapping[tuple[str, int], PoolMember]
"""Members by (instance, rank)."""


@dataclass(slots=True)
class PoolWatch:
    """Follows the registry's stream in the background from ``start`` to ``close``."""

    control_address: str
    """Of several routers with commas between: while one is away, the next is followed."""
    endpoint: str
    credentials: Credentials
    members: PoolMembers = field(default_factory=dict)
    on_members: Callable[[PoolMembers], None] = lambda members: None
    """Hears of every change while the registry answers."""
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow; ``members`` is replaced at each change."""
        self._task = asyncio.create_task(self._follow(), name="pool-watch")

    async def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def is_ready(self, endpoint: str = "") -> bool:
        """Whether the HTTP side of the router, or of another one, answers ready."""
        return await asyncio.to_thread(_answers_ready, endpoint or self.endpoint, self.credentials)

    async def _follow(self) -> None:
        addresses = self.control_address.split(",")
        for address in itertools.cycle(addresses):
            with contextlib.suppress(ConnectionError):
                await self._follow_once(address, waits=len(addresses) == 1)
            self.members = {}
            await asyncio.sleep(_RECONNECT_S)

    async def _follow_once(self, address: str, *, waits: bool) -> None:
        """``waits`` for a router that is not up yet."""
        # Imported late: gRPC must not be loaded yet when Ray starts its daemons.
        from runtime.errors import TandemError
        from runtime.net.roles import Role as Callee
        from runtime.pb import registry_pb2, registry_pb2_grpc
        from runtime.rpc.grpc_calls import map_rpc_errors, open_channel

        channel = open_channel(address, self.credentials, Callee.ROUTER)
        try:
            with map_rpc_errors(f"registry {address}"):
                stub = registry_pb2_grpc.RegistryStub(channel)
                request = registry_pb2.WatchRequest(watcher="controller")
                async for snapshot in stub.Watch(request, wait_for_ready=waits):
                    self.members = _members_of(snapshot)
                    self.on_members(self.members)
        except TandemError as error:
            raise ConnectionError(str(error)) from error
        finally:
            await channel.close(None)


async def fetch_members(
    control_address: str, endpoint: str, credentials: Credentials, *, timeout_s: float
) -> PoolMembers:
    """The pool once; empty when the router does not answer in time."""
    watch = PoolWatch(control_address, endpoint, credentials)
    watch.start()
    try:
        async with asyncio.timeout(timeout_s):
            while not watch.members:
                await asyncio.sleep(0.02)
    except TimeoutError:
        return {}
    finally:
        await watch.close()
    return watch.members


def _members_of(snapshot: PoolSnapshot) -> dict[tuple[str, int], PoolMember]:
    return {
        (member.worker.identity.instance, member.worker.identity.rank): PoolMember(
            epoch=member.worker.identity.epoch,
            role=_role_of(member.worker),
            address=member.worker.address,
            num_requests_running=member.load.num_requests_running,
            num_requests_waiting=member.load.num_requests_waiting,
            num_free_blocks=member.load.num_free_blocks,
            num_total_blocks=member.load.num_total_blocks,
            draining=member.worker.draining,
        )
        for member in snapshot.members
    }


def _role_of(worker: WorkerRecord) -> Role:
    from runtime.pb import common_pb2

    return Role.PREFILL if worker.role == common_pb2.ROLE_PREFILL else Role.DECODE


def _answers_ready(endpoint: str, credentials: Credentials) -> bool:
    connection = connect_http(endpoint, credentials.client_ssl_context(), timeout_s=_HTTP_TIMEOUT_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
