"""The gRPC face of the registry, and the watcher by which another process follows it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from router.pool.members import (
    Departure,
    Member,
    departure_from_proto,
    departure_to_proto,
    load_from_proto,
    member_from_proto,
    member_to_proto,
)
from router.pool.rank_watch import RankWatch
from router.pool.registry import Registry, SupersededError
from runtime.errors import InvalidRequestError, TandemError
from runtime.logging import get_logger
from runtime.net.credentials import Credentials
from runtime.net.roles import Role
from runtime.pb import registry_pb2, registry_pb2_grpc
from runtime.rpc.grpc_calls import caller_roles, map_rpc_errors, open_channel
from runtime.rpc.wire import error_to_proto, own_wire, why_refused
from runtime.stragglers.rank_picture import RankPicture, picture_from_proto, picture_to_proto

logger = get_logger(__name__)

MIN_SNAPSHOT_INTERVAL_S = 0.05
RETRY_S = 0.5

PoolListener = Callable[[Sequence[Member], Sequence[Departure]], None]
RanksListener = Callable[[Sequence[RankPicture]], None]
RefusedListener = Callable[[Sequence[str]], None]


class RegistryService(registry_pb2_grpc.RegistryServicer):
    """Serves ``Registry``; tells its listener and other processes' watchers of each change."""

    def __init__(
        self,
        registry: Registry,
        listener: PoolListener | None = None,
        *,
        watch: RankWatch | None = None,
        on_ranks: RanksListener = lambda pictures: None,
        on_refused: RefusedListener = lambda refused: None,
    ) -> None:
        """``listener`` is called on the event loop after each change, with the whole pool and the
        last workers that went; ``on_ranks`` with what ``watch`` makes of their waits;
        ``on_refused`` with why others are not in the pool.
        """
        self._registry = registry
        self._listener, self._on_ranks, self._on_refused = listener, on_ranks, on_refused
        self._watch = watch or RankWatch(asyncio.get_running_loop().time)
        self._changed: set[asyncio.Event] = set()
        self._announced = registry.version
        self._closed = False

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: object
    ) -> registry_pb2.RegisterResponse:
        """A worker joins the pool."""
        identity = request.worker.identity
        name = f"worker {identity.instance}/{identity.rank}"
        try:
            # First: what else it says may not mean what we take it for.
            if reason := why_refused(name, request.wire):
                raise ValueError(reason)
            member = member_from_proto(request.worker, request.load)
            if member.role.value not in caller_roles():
                proven = " and ".join(sorted(caller_roles()))
                told = f"role = {member.role.value}: the worker's secret or certificate is of"
                raise ValueError(f"{told} {proven}. Fix: those of its role")
            lease_id = self._registry.register(member)
        except ValueError as error:
            logger.warning("refused a worker: %s", error)
            superseded = isinstance(error, SupersededError)
            if not superseded:
                told = str(error) if str(error).startswith(name) else f"{name}: {error}"
                self._registry.note_refused(identity.instance, identity.rank, told)
                self.announce()
            return registry_pb2.RegisterResponse(
                error=error_to_proto(InvalidRequestError(str(error))),
                superseded=superseded,
                wire=own_wire(),
            )
        logger.info(
            "worker joined role=%s worker=%s address=%s",
            member.role.value,
            member.key,
            member.address,
        )
        self.announce()
        return registry_pb2.RegisterResponse(
            lease_id=lease_id, lease_ttl_s=self._registry.ttl_s, wire=own_wire()
        )

    async def Renew(
        self, request: registry_pb2.RenewRequest, context: object
    ) -> registry_pb2.RenewResponse:
        """A worker lives, with fresh load."""
        load = load_from_proto(request.load)
        known = self._registry.renew(
            request.lease_id, load, draining=request.draining, num_routers=request.num_routers
        )
        member = self._registry.member_of(request.lease_id)
        if member is not None:
            self._watch.heard(member.key, member.num_ranks, request.load.waits)
        self.announce()
        return registry_pb2.RenewResponse(known=known)

    async def Deregister(
        self, request: registry_pb2.DeregisterRequest, context: object
    ) -> registry_pb2.DeregisterResponse:
        """A worker leaves."""
        key = self._registry.deregister(request.lease_id)
        if key is not None:
            logger.info("worker left worker=%s", key)
        self.announce()
        return registry_pb2.DeregisterResponse()

    async def Watch(
        self, request: registry_pb2.WatchRequest, context: object
    ) -> AsyncIterator[registry_pb2.PoolSnapshot]:
        """The pool now and after each change; changes close together come as one."""
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            while not self._closed:
                changed.clear()
                members = [member_to_proto(member) for member in self._registry.members()]
                gone = [departure_to_proto(gone) for gone in self._registry.departures()]
                yield registry_pb2.PoolSnapshot(
                    version=self._registry.version,
                    members=members,
                    departures=gone,
                    ranks=[picture_to_proto(picture) for picture in self._pictures()],
                    refused=self._registry.refused(),
                )
                await changed.wait()
                await asyncio.sleep(MIN_SNAPSHOT_INTERVAL_S)
        finally:
            self._changed.discard(changed)

    async def expire_forever(self) -> None:
        """Drop leases as they run out; runs until cancelled.

        What keeps this loop from its turn keeps it from hearing renewals: no lease ages by it.
        """
        interval_s = self._registry.tick_interval_s
        while True:
            await asyncio.sleep(interval_s)
            stall_s = self._registry.tick()
            if stall_s > self._registry.ttl_s / 2:
                logger.warning("stood still: leases last longer by that stall_s=%.2f", stall_s)
            for key in self._registry.expire():
                logger.warning("the lease of a worker ran out worker=%s", key)
            self.announce()

    def close(self) -> None:
        """End all Watch streams."""
        self._closed = True
        for changed in self._changed:
            changed.set()

    def announce(self) -> None:
        """Tell everyone, if anything changed since the last time."""
        if self._registry.version == self._announced:
            return
        self._announced = self._registry.version
        if self._listener is not None:
            self._listener(self._registry.members(), self._registry.departures())
            self._on_ranks(self._pictures())
            self._on_refused(self._registry.refused())
        for changed in self._changed:
            changed.set()

    def _pictures(self) -> list[RankPicture]:
        lives = {member.key.life for member in self._registry.members()}
        return self._watch.pictures(lives)


async def watch_forever(
    control_address: str,
    credentials: Credentials,
    watcher: str,
    listener: PoolListener,
    *,
    on_ranks: RanksListener = lambda pictures: None,
    on_refused: RefusedListener = lambda refused: None,
) -> None:
    """Follow the registry of another process; runs until cancelled.

    While the control process is away the last known pool stays in use: workers outlive it.
    """
    async with open_channel(control_address, credentials, Role.ROUTER) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        while True:
            with contextlib.suppress(TandemError), map_rpc_errors(f"registry {control_address}"):
                async for snapshot in stub.Watch(registry_pb2.WatchRequest(watcher=watcher)):
                    members = [member_from_proto(m.worker, m.load) for m in snapshot.members]
                    listener(members, [departure_from_proto(gone) for gone in snapshot.departures])
                    on_ranks([picture_from_proto(picture) for picture in snapshot.ranks])
                    on_refused(snapshot.refused)
            await asyncio.sleep(RETRY_S)
