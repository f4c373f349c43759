"""One rank of either role as a process: boot, serve, register, watch, drain, leave.

What is the same for all is here; a role plugs in as a `RoleDriver`. `runtime.service.run_service`
drives it. Threads: the event loop (gRPC, metrics, registration), the engine loop, and those that
move KV. If the engine loop fails, or our lease is not renewed any more, the process answers every
request and exits non-zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc.aio
from prometheus_client import CollectorRegistry

from engine.parallel.groups import ProcessGroups
from runtime.background import tell_failure
from runtime.errors import DrainingError
from runtime.logging import fields, get_logger
from runtime.metrics.core import MetricsServer, gauge_of
from runtime.metrics.vllm_names import VllmNames
from runtime.pb import common_pb2, registry_pb2
from runtime.rpc.call_server import CallServer
from runtime.rpc.grpc_calls import bind_port, create_server
from runtime.rpc.registration import RegistryClient
from runtime.rpc.wire import identity
from worker.arguments import WorkerOptions
from worker.daemon import run_on_daemon
from worker.health import Health
from worker.load_lines import tell_load

logger = get_logger(__name__)

SWEEP_INTERVAL_S = 1.0
STOP_TIMEOUT_S = 12.0
"""How long the engine loop may take to end; in a group, beyond what is left of the grace period,
which the other ranks may need."""
FOLLOW_GRACE_S = 10.0
"""How long a rank may drain that was not told to stop, but another one of its group was: that one
waits for it as long as `STOP_TIMEOUT_S`."""
DRAIN_SHARE = 0.8
"""Of the time to drain, what requests have to end by themselves; the rest is for moving them."""
ANSWER_GRACE_S = 1.0
"""How long calls that are answered may take to be read when the process ends."""


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRank:
    """A rank that can run steps and move KV.

    Attributes:
        groups: the ranks of the instance.
        epoch: of this life of the instance.
        max_model_len: most tokens of prompt and output together.
        close_transfer: lets the peers go; blocks.
        close_model: frees what the ranks opened with one another; only where all of them do.
        settle: called when everything that stays is there, before the first step.
    """

    groups: ProcessGroups
    epoch: int
    max_model_len: int
    close_transfer: Callable[[], None]
    close_model: Callable[[], None]
    settle: Callable[[], None] = lambda: None


class Loop(Protocol):
    """What runs the steps, and answers every request when it ends: `step_loop.StepLoop`."""

    ended: Future[BaseException | None]
    other_leaves: Future[None]

    def stop(self, timeout_s: float) -> bool:
        """End it; whether it ended in time. Blocks."""
        ...

    @property
    def start(self) -> Callable[[], None]:
        """Begins."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What takes requests. Called on the event loop.

    Attributes:
        serve: adds the service to a server that peers reach at an address, and what routers call
            for each request to the server of short calls.
        record: what only the role knows of this worker.
        load: as of the last step, in a new message.
        refuse: takes nothing new from now on.
        drain: after that, returns when nothing is left; given the seconds that requests have to
            end by themselves, before it gives them back.
        sweep: looks after what nobody tells it of; called every second.
        flush: the engine loop has answered everybody: lets them read it.
    """

    serve: Callable[[grpc.aio.Server, CallServer, str], None]
    record: registry_pb2.WorkerRecord
    load: Callable[[], registry_pb2.WorkerLoad]
    refuse: Callable[[], None]
    drain: Callable[[float], Awaitable[None]]
    sweep: Callable[[], Awaitable[None]] = _nothing
    flush: Callable[[], Awaitable[None]] = _nothing


class RoleDriver(Protocol):
    """What a role adds to a rank; called in this order."""

    def boot(self) -> HostedRank:
        """Boot the model, open the transfer, meet the other ranks. Blocks, on a thread of its own.

        What fails here is closed by the end of the process: others may wait in a collective.
        """
        ...

    def build(
        self, host: WorkerHost, closing: contextlib.AsyncExitStack
    ) -> tuple[Loop, Endpoint | None]:
        """Make what runs steps and, where this rank has one, what takes requests.

        `closing` takes what is to be closed when nothing is served any more, last things first.
        """
        ...


class WorkerHost:
    """One rank as a service: see `runtime.service.Service`."""

    def __init__(self, options: WorkerOptions, driver: RoleDriver) -> None:
        self.grace_s = options.grace_s
        self.registry = CollectorRegistry()
        """The metrics of this process."""
        self.health = Health(self.registry)
        """A role adds its parts when it builds."""
        self.is_stuck = False
        """The boot or the engine loop did not end, or the device may hang, or the ranks of the
        group did not end together: nobody may wait for them, and no destructor run."""
        self._options, self._driver = options, driver
        self._endpoint: Endpoint | None = None
        self._ended: asyncio.Future[BaseException | None] | None = None
        self._membership: RegistryClient | None = None
        self._is_draining = False
        self._drain_until = 0.0
        """When the grace period ends, which is that of the other ranks, too."""
        self._unknown: asyncio.Future[None] | None = None
        """Done when no router will know this rank any more."""
        # What was acquired, released in reverse order by `shutdown`.
        self._exit = contextlib.AsyncExitStack()

    @property
    def identity(self) -> common_pb2.WorkerIdentity:
        """Of this rank, once it has booted."""
        return identity(self._options.instance, self._rank.epoch, self._options.rank)

    async def startup(self) -> None:
        """Boot; on return the rank is in the router's pool."""
        self._options.credentials.check_certificate(self._options.listen.reach)
        self.is_stuck = True  # unless the boot ends well
        self._rank = rank = await run_on_daemon(self._driver.boot, name="boot")
        self.is_stuck = False
        self._exit.callback(self._leave_groups)
        self._exit.push_async_callback(asyncio.to_thread, rank.close_transfer)
        closing = await self._exit.enter_async_context(contextlib.AsyncExitStack())
        self._loop, self._endpoint = self._driver.build(self, closing)
        self._exit.push_async_callback(self._stop_loop)
        self._ended = asyncio.wrap_future(self._loop.ended)
        rank.settle()
        self._exit.enter_context(self.health.pauses.watched())
        self._loop.start()
        if self._endpoint is not None:
            await self._serve(self._endpoint)

    async def main_loop(self) -> None:
        """Look after things until the engine loop ends, or the renewal of our lease does.

        Returns when another rank of the group was told to stop, and nothing is left here.

        Raises:
            TandemError: what ended it; every request was answered, or is by `shutdown`.
        """
        assert self._ended is not None
        watched: set[asyncio.Future[Any]] = {self._ended}
        if self._membership is not None:
            self._unknown = asyncio.ensure_future(self._membership.wait_failed())
            self._exit.callback(self._unknown.cancel)
            watched.add(self._unknown)
        following = asyncio.ensure_future(self._follow_the_other())
        self._exit.callback(following.cancel)
        watched.add(following)
        while not any(future.done() for future in watched):
            await asyncio.wait(
                watched, timeout=SWEEP_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
            )
            self.health.pauses.tell()
            if self._endpoint is not None and not self._ended.done():
                await self._endpoint.sweep()
        if not self._ended.done():
            if self._unknown is not None and self._unknown.done():
                self._unknown.result()  # raises, or was ended by `shutdown`
            if following.done():
                following.result()
            return
        error = self._ended.result()
        if error is not None:
            raise error

    async def drain(self) -> None:
        """Refuse new requests; return when nothing is left."""
        self._drain_until = time.monotonic() + self.grace_s
        try:
            if self._endpoint is not None:
                self._endpoint.refuse()
                await self._endpoint.drain(DRAIN_SHARE * self.grace_s)
            elif self._ended is not None:
                await asyncio.wait({self._ended})  # whoever schedules for this rank drains
        except asyncio.CancelledError:
            self._drain_until = 0.0  # whoever cuts it short does not wait for other ranks either
            raise

    async def _follow_the_other(self) -> None:
        """Once another rank of the group leaves, drain in the time that it has left us."""
        # Shielded: the loop's thread may be about to say so as this is cancelled.
        await asyncio.shield(asyncio.wrap_future(self._loop.other_leaves))
        logger.info("another rank of %s was told to stop: this one follows", self.identity.instance)
        with contextlib.suppress(TimeoutError, DrainingError):  # or the engine loop has just ended
            if self._endpoint is not None:
                grace_s = min(self.grace_s, FOLLOW_GRACE_S)
                self._endpoint.refuse()
                async with asyncio.timeout(grace_s):
                    await self._endpoint.drain(DRAIN_SHARE * grace_s)

    async def shutdown(self) -> None:
        """Undo `startup`, last things first."""
        await self._exit.aclose()

    def tell_draining(self) -> None:
        """Have the router know that this rank takes nothing new."""
        logger.info("draining")
        self._is_draining = True
        if self._membership is not None:
            self._membership.set_draining()

    async def _serve(self, endpoint: Endpoint) -> None:
        """Listen for scrapes and for calls; join the router's pool."""
        listen, credentials = self._options.listen, self._options.credentials
        probing = asyncio.create_task(self.health.watch_event_loop(), name="health")
        probing.add_done_callback(tell_failure)
        self._exit.callback(probing.cancel)
        telling = asyncio.create_task(tell_load(self.registry, endpoint.load), name="load-lines")
        telling.add_done_callback(tell_failure)
        self._exit.callback(telling.cancel)
        metrics = MetricsServer(
            self.registry, self.health.report, self._is_ready, self._introduce()
        )
        self._exit.push_async_callback(metrics.stop)
        scraped = replace(listen, port=self._options.metrics_port)
        port = await metrics.start(scraped, credentials.http_ssl_context())
        metrics_address = listen.address(port)
        server = create_server(credentials)
        address = listen.address(bind_port(server, listen, credentials, "--port"))
        calls = CallServer(credentials)
        endpoint.serve(server, calls, address)
        called = replace(listen, port=self._options.calls_port)
        calls_address = listen.address(calls.start(called))
        await server.start()
        self._exit.push_async_callback(self._stop_serving, server, calls, endpoint)
        addresses = registry_pb2.WorkerRecord(
            address=address, calls_address=calls_address, metrics_address=metrics_address
        )
        logger.info("serving %s", fields(address=address, metrics_address=metrics_address))
        record = self._record(endpoint, addresses)
        self._membership = membership = RegistryClient(
            self._options.router, credentials, record, endpoint.load
        )
        gauge_of(
            self.registry,
            "pd_worker_registered",
            "1 while a router has this worker in its pool",
            lambda: membership.is_registered,
        )
        self._exit.push_async_callback(self._membership.close)
        await membership.start()
        self.health.add("registration", self._check_registration)
        logger.info("ready %s", fields(address=address, epoch=f"{self._rank.epoch:016x}"))

    def _introduce(self) -> VllmNames:
        """Say who answers scrapes."""
        options, model = self._options, self._options.served_name
        role, rank = options.role, options.rank
        self.health.process.tell(role=role, model=model, worker=options.instance, rank=rank)
        gauge_of(
            self.registry,
            "pd_worker_kv_block_tokens",
            "Tokens of a KV block",
            lambda: options.section.block_size,
        )
        return VllmNames(role=role, model=model, rank=rank)

    def _record(
        self, endpoint: Endpoint, addresses: registry_pb2.WorkerRecord
    ) -> registry_pb2.WorkerRecord:
        record = registry_pb2.WorkerRecord(
            identity=self.identity,
            num_ranks=self._options.section.num_ranks,
            model=self._options.served_name,
            max_model_len=self._rank.max_model_len,
            transport=self._options.config.kv_transfer.transport,
            block_size=self._options.section.block_size,
            pid=os.getpid(),
        )
        record.MergeFrom(addresses)
        record.MergeFrom(endpoint.record)
        return record

    async def _stop_serving(
        self, server: grpc.aio.Server, calls: CallServer, endpoint: Endpoint
    ) -> None:
        """End the engine loop first: its last events answer the calls that are still open."""
        endpoint.refuse()
        await self._stop_loop()
        await endpoint.flush()
        await asyncio.gather(server.stop(ANSWER_GRACE_S), calls.stop(ANSWER_GRACE_S))

    def _is_ready(self) -> bool:
        """Whether routers send requests here: one has us in its pool, and we are not draining."""
        membership = self._membership
        return membership is not None and membership.is_registered and not self._is_draining

    def _check_registration(self) -> str:
        is_over = self._unknown is not None and self._unknown.done()
        if is_over:
            return "the lease is not renewed any more"
        # Another start will not help it either, but says at once what has to change.
        return self._membership.refusal if self._membership is not None else ""

    async def _stop_loop(self) -> None:
        if not self.is_stuck:
            grace_left_s = max(0.0, self._drain_until - time.monotonic())
            timeout_s = STOP_TIMEOUT_S + grace_left_s
            self.is_stuck = not await asyncio.to_thread(self._loop.stop, timeout_s)

    def _leave_groups(self) -> None:
        groups, ended = self._rank.groups, self._ended
        if ended is None or not ended.done() or ended.result() is not None:
            # Others may be gone, and leaving in order takes all ranks; kernels may wait for them.
            self.is_stuck |= groups.dims.world_size > 1
        if not self.is_stuck:
            self._rank.close_model()
            groups.destroy()
