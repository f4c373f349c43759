"""A worker's membership in the router's pool: register, renew with fresh load, leave.

The lease is the only proof of life that the router has. A router that was restarted knows no lease:
the worker registers again by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from runtime.errors import ConfigError, InternalError, TandemError
from runtime.logging import get_logger
from runtime.pb import registry_pb2, registry_pb2_grpc
from runtime.rpc import map_rpc_errors, open_channel
from runtime.wire import error_from_proto

logger = get_logger(__name__)

RETRY_S = 0.5


class RegistryClient:
    """Keeps one worker registered from ``start`` to ``close``."""

    def __init__(
        self,
        control_address: str,
        secret: str,
        record: registry_pb2.WorkerRecord,
        load: Callable[[], registry_pb2.WorkerLoad],
    ) -> None:
        """``load`` is called on the event loop at each renewal and must not block."""
        self._peer = f"registry {control_address}"
        self._channel = open_channel(control_address, secret)
        self._stub = registry_pb2_grpc.RegistryStub(self._channel)
        self._record = record
        self._load = load
        self._lease_id = ""
        self._ttl_s = 1.0
        self._draining = False
        self._closing = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register, waiting for a router that is not up yet, and keep renewing.

        Raises:
            ConfigError: the registry refuses this worker.
        """
        await self._register()
        self._changed.set()  # the first renewal, which carries the first load, is due at once
        self._task = asyncio.create_task(self._renew_forever(), name="registry-renewal")

    async def wait_failed(self) -> None:
        """Raise what ended the renewal, should anything: nothing keeps the worker in its pool then.

        Returns when the client was closed.
        """
        assert self._task is not None
        await asyncio.wait({self._task})
        if not self._closing:
            cause = None if self._task.cancelled() else self._task.exception()
            raise InternalError(f"the lease at {self._peer} is not renewed any more") from cause

    def set_draining(self) -> None:
        """Tell the router at once that this worker takes nothing new."""
        self._draining = True
        self._changed.set()

    async def close(self) -> None:
        """Leave the pool; an unreachable router is left to the lease."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._lease_id:
            try:
                with map_rpc_errors(self._peer):
                    request = registry_pb2.DeregisterRequest(lease_id=self._lease_id)
                    await self._stub.Deregister(request, timeout=2)
            except TandemError as error:
                logger.info("leaving without the router: %s", error)
        await self._channel.close(None)

    async def _register(self) -> None:
        request = registry_pb2.RegisterRequest(worker=self._record)
        warned = False
        while True:
            try:
                with map_rpc_errors(self._peer):
                    response = await self._stub.Register(request, timeout=5)
                break
            except TandemError as error:
                if not warned:
                    logger.warning("cannot register yet: %s", error)
                    warned = True
                await asyncio.sleep(RETRY_S)
        if response.HasField("error"):
            refusal = error_from_proto(response.error).message
            name = self._record.identity.instance
            raise ConfigError("worker", name, refusal, "the router's model and settings")
        self._lease_id = response.lease_id
        self._ttl_s = response.lease_ttl_s
        logger.info("registered lease_id=%s ttl_s=%g", self._lease_id, self._ttl_s)

    async def _renew_forever(self) -> None:
        # A cancel that meets the end of a wait or of a call can be lost; the flag cannot.
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._ttl_s / 3)
            self._changed.clear()
            try:
                await self._renew()
            except TandemError as error:
                logger.warning("cannot renew the lease: %s", error)

    async def _renew(self) -> None:
        request = registry_pb2.RenewRequest(
            lease_id=self._lease_id, load=self._load(), draining=self._draining
        )
        with map_rpc_errors(self._peer):
            response = await self._stub.Renew(request, timeout=self._ttl_s)
        if not response.known:
            logger.warning("the router does not know the lease any more: registering again")
            await self._register()
