"""A worker's membership in routers' pools: register, renew with fresh load, leave.

A lease is the only proof of life that a router has, and all that it remembers: one that was
restarted knows no lease, and the worker registers again by itself. Routers know nothing of one
another; a worker holds a lease at each.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import psutil

from runtime.errors import ConfigError, InternalError, TandemError
from runtime.logging import get_logger
from runtime.net import Credentials
from runtime.pb import registry_pb2, registry_pb2_grpc
from runtime.rpc import map_rpc_errors, open_channel
from runtime.wire import error_from_proto

logger = get_logger(__name__)

RETRY_S = 0.5
REFUSED_RETRY_MAX_S = 10.0
MIN_RENEW_TIMEOUT_S = 0.2

LoadSource = Callable[[], registry_pb2.WorkerLoad]


class RegistryClient:
    """Keeps one worker registered from ``start`` to ``close``."""

    def __init__(
        self,
        routers: str,
        credentials: Credentials,
        record: registry_pb2.WorkerRecord,
        load: LoadSource,
    ) -> None:
        """``routers`` is the "host:port" of a registry, or several with commas between.

        ``load`` is called on the event loop at each renewal, makes a new message and must not
        block. What it does not number is numbered here.
        """
        mine = registry_pb2.WorkerRecord()
        mine.CopyFrom(record)
        mine.started_ms = record.started_ms or round(psutil.Process().create_time() * 1000)
        self._leases = [
            _Lease(address.strip(), credentials, mine, load) for address in routers.split(",")
        ]

    @property
    def is_registered(self) -> bool:
        """Whether a router has this worker in its pool, as far as we know."""
        return any(lease.is_held for lease in self._leases)

    async def start(self) -> None:
        """Register, waiting for a router that is not up yet, and keep renewing.

        Returns when the first of several routers has answered; the others may come later.

        Raises:
            ConfigError: that registry refuses this worker.
        """
        begun = [asyncio.ensure_future(lease.begin()) for lease in self._leases]
        try:
            done, _ = await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)

    async def wait_failed(self) -> None:
        """Raise what ended the renewal, should anything: nothing keeps the worker in its pool then.

        Returns when the client was closed.
        """
        await asyncio.gather(*(lease.wait_failed() for lease in self._leases))

    def set_draining(self) -> None:
        """Tell the routers at once that this worker takes nothing new."""
        for lease in self._leases:
            lease.set_draining()

    async def close(self) -> None:
        """Leave the pools; an unreachable router is left to the lease."""
        await asyncio.gather(*(lease.close() for lease in self._leases))


class _Lease:
    """The place in one router's pool."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        record: registry_pb2.WorkerRecord,
        load: LoadSource,
    ) -> None:
        self._peer = f"registry {address}"
        self._channel = open_channel(address, credentials)
        self._stub = registry_pb2_grpc.RegistryStub(self._channel)
        self._record = record
        self._load = load
        self._num_loads = 0
        self._lease_id = ""
        self._ttl_s = 1.0
        self._held_until = 0.0
        self._trouble = ""
        """Of the last try, so that it is logged once."""
        self._draining = False
        self._closing = False
        self._changed = asyncio.Event()
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The outcome of the first registration that was answered."""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_held(self) -> bool:
        return bool(self._lease_id) and time.monotonic() < self._held_until

    async def begin(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name=f"lease at {self._peer}")
        # Should the task end by a bug, nobody would ever answer.
        await asyncio.wait({self._first, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not self._first.done():
            await self.wait_failed()
        self._first.result()

    async def wait_failed(self) -> None:
        assert self._task is not None
        await asyncio.wait({self._task})
        if not self._closing:
            cause = None if self._task.cancelled() else self._task.exception()
            raise InternalError(f"the lease at {self._peer} is not renewed any more") from cause

    def set_draining(self) -> None:
        self._draining = True
        self._changed.set()

    async def close(self) -> None:
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._first.done():
            self._first.exception()  # told to whoever waited; with several routers perhaps nobody
        if self._lease_id:
            try:
                with map_rpc_errors(self._peer):
                    request = registry_pb2.DeregisterRequest(lease_id=self._lease_id)
                    await self._stub.Deregister(request, timeout=2)
            except TandemError as error:
                logger.info("leaving without the router: %s", error)
        await self._channel.close(None)

    async def _keep(self) -> None:
        # A cancel that meets the end of a wait or of a call can be lost; the flag cannot.
        while not self._closing:
            await self._register()
            while self._lease_id and not self._closing:
                await self._renew()

    async def _register(self) -> None:
        """Return with a lease."""
        refused_s = RETRY_S
        while not self._closing:
            try:
                with map_rpc_errors(self._peer):
                    response = await self._stub.Register(self._registration(), timeout=5)
            except TandemError as error:
                self._note_trouble("cannot register yet", error.message)
                await asyncio.sleep(RETRY_S)
                continue
            if not response.HasField("error"):
                self._take(response)
                return
            refusal = error_from_proto(response.error).message
            self._note_trouble(f"refused by {self._peer}, serving nothing", refusal, refusal)
            if not response.superseded and not self._first.done():
                name = self._record.identity.instance
                fix = "the router's model and settings"
                self._first.set_exception(ConfigError("worker", name, refusal, fix))
            await asyncio.sleep(refused_s)
            refused_s = min(2 * refused_s, REFUSED_RETRY_MAX_S)

    def _registration(self) -> registry_pb2.RegisterRequest:
        request = registry_pb2.RegisterRequest(worker=self._record, load=self._numbered_load())
        request.worker.draining = self._draining
        return request

    def _take(self, response: registry_pb2.RegisterResponse) -> None:
        self._lease_id = response.lease_id
        self._ttl_s = response.lease_ttl_s
        self._trouble = ""
        self._hold()
        logger.info("registered lease_id=%s ttl_s=%g", self._lease_id, self._ttl_s)
        if not self._first.done():
            self._first.set_result(None)

    async def _renew(self) -> None:
        """Wait until it is time, then renew; one lost call is repeated while the lease runs."""
        pause_s = self._ttl_s / (12 if self._trouble else 3)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), pause_s)
        self._changed.clear()
        request = registry_pb2.RenewRequest(
            lease_id=self._lease_id, load=self._numbered_load(), draining=self._draining
        )
        timeout_s = max(MIN_RENEW_TIMEOUT_S, self._ttl_s / 4)
        try:
            with map_rpc_errors(self._peer):
                response = await self._stub.Renew(request, timeout=timeout_s)
        except TandemError as error:
            self._note_trouble("cannot renew the lease", error.message)
            return
        if self._trouble:
            logger.info("the lease is renewed again lease_id=%s", self._lease_id)
        self._trouble = ""
        if response.known:
            self._hold()
        else:
            logger.warning("the router does not know the lease any more: registering again")
            self._lease_id = ""

    def _hold(self) -> None:
        self._held_until = time.monotonic() + self._ttl_s

    def _numbered_load(self) -> registry_pb2.WorkerLoad:
        load = self._load()
        if not load.sequence:
            self._num_loads += 1
            load.sequence = self._num_loads
        load.clock_s = time.monotonic()
        return load

    def _note_trouble(self, what: str, reason: str, kind: str = "") -> None:
        if (what + kind) != self._trouble:
            self._trouble = what + kind
            logger.warning("%s: %s", what, reason)
