"""The process of a prefill rank that takes requests: gRPC server, engine loop, registration.

Rank 0 of a tensor-parallel instance, which speaks for all its ranks (the others are
`prefill.follower_worker`), or any rank of a data-parallel one, which speaks for itself alone.
`runtime.service.run_service` drives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from functools import partial

import grpc.aio
from prometheus_client import CollectorRegistry

from engine.boot import use_device
from engine.memory.block_pool import BlockPool
from engine.parallel.lockstep import create_lockstep
from prefill.assembly import RankParts, build_rank
from prefill.closer import TicketCloser
from prefill.live_runs import LiveRuns
from prefill.loop import EngineLoop, LoopSettings
from prefill.messages import Event, LoopLoad, RankClosed
from prefill.metrics import PrefillMetrics
from prefill.nonces import NonceMemory
from prefill.peers import ChannelCache, Greeting, PeerDirectory
from prefill.rank_link import LeaderLink
from prefill.rank_plan import Closure
from prefill.scheduler import Scheduler
from prefill.sender_group import SenderGroup
from prefill.service import PrefillService
from prefill.stall import StallMeter
from prefill.validation import RunLimits
from runtime.daemon import run_on_daemon
from runtime.endings import failure_of_requests
from runtime.logging import fields, get_logger
from runtime.metrics import MetricsServer, gauge_of
from runtime.pb import common_pb2, prefill_pb2_grpc, registry_pb2
from runtime.registration import RegistryClient
from runtime.rpc import bind_port, create_server, open_channel
from runtime.wire import identity
from runtime.worker import WorkerOptions

JOIN_TIMEOUT_S = 5.0
GROUP_JOIN_TIMEOUT_S = 12.0
"""How long other ranks of the group may take to end their work; longer than their grace period."""
ANSWER_GRACE_S = 1.0
FLUSH_TIMEOUT_S = 3.0

logger = get_logger(__name__)


class PrefillWorker:
    """One rank as a service: see `runtime.service.Service`."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        # What was acquired, released in reverse order by `shutdown`.
        self._stack = contextlib.AsyncExitStack()
        self._metrics_registry = CollectorRegistry()
        self._metrics = PrefillMetrics(self._metrics_registry)
        self._nonces = NonceMemory(time.monotonic)
        self._channels = ChannelCache(partial(open_channel, secret=options.secret))
        self._closer = TicketCloser(self._channels)
        self._loop: EngineLoop | None = None
        self._service: PrefillService | None = None
        self._runs: LiveRuns | None = None
        self._registration: RegistryClient | None = None
        self.is_stuck = False
        """The engine loop did not end, or the device may hang: nobody may wait for either."""

    async def startup(self) -> None:
        """Build the rank, serve, register."""
        self._stack.push_async_callback(self._channels.close)
        self.is_stuck = True  # unless the boot ends well
        build = partial(build_rank, self._options, self._ticket_closed)
        parts = await run_on_daemon(build, name="boot")
        self.is_stuck = False
        self._stack.callback(self._leave_groups, parts)
        self._stack.push_async_callback(asyncio.to_thread, parts.send.transport.close)
        peers = self._meet_peers(parts)
        self._runs = self._make_runs(parts, peers)
        self._stack.push_async_callback(self._close_tickets, parts)
        stalls = StallMeter(parts.send.sender, self._metrics.step_stalled)
        emit = _emitter(self._runs)
        self._loop = make_loop(parts, self._options, emit, stalls, self._metrics)
        self._stack.push_async_callback(self._stop_loop)
        self._watch(self._loop, parts)
        self._service = PrefillService(
            _limits_of(parts, self._options),
            self._runs,
            self._nonces,
            peers,
            self._loop.submit,
            on_draining=self._tell_router,
        )
        addresses = await self._serve(self._service)
        self._loop.start()
        await self._register(parts, *addresses)

    async def main_loop(self) -> None:
        """Run as long as the engine loop does.

        Raises:
            TandemError: what ended the engine loop; every request was answered.
        """
        assert self._runs is not None
        ended = await asyncio.shield(self._runs.loop_ended)
        if ended.error is not None:
            raise ended.error

    async def drain(self) -> None:
        """Refuse new requests; return when the last one is drained and decode knows."""
        assert self._service is not None
        assert self._runs is not None
        self._service.start_draining()
        await self._runs.wait_empty()

    async def shutdown(self) -> None:
        """Leave the pool, stop the engine loop, close what is left, let everything go."""
        await self._stack.aclose()

    def _meet_peers(self, parts: RankParts) -> PeerDirectory:
        greeting = Greeting(
            identity=_identity_of(parts, self._options),
            num_ranks=self._options.config.prefill.tp,
            transport=self._options.config.kv_transfer.transport,
            layout=parts.send.layout,
            slot_bytes=parts.send.slot_layout.slot_bytes,
        )
        peers = PeerDirectory(greeting, self._channels)
        self._stack.push_async_callback(peers.close)
        return peers

    def _make_runs(self, parts: RankParts, peers: PeerDirectory) -> LiveRuns:
        return LiveRuns(
            _identity_of(parts, self._options),
            self._options.config.prefill.tp,
            nonces=self._nonces,
            closer=self._closer,
            metrics=self._metrics,
            forget_peer=peers.forget,
        )

    def _watch(self, loop: EngineLoop, parts: RankParts) -> None:
        self._metrics.watch(lambda: loop.load, lambda: self._closer.num_dropped)
        gauge_of(
            self._metrics_registry,
            "pd_kv_transfer_registered_bytes",
            "Memory that is registered with the transport",
            lambda: parts.send.transport.registered_bytes,
        )

    async def _serve(self, service: PrefillService) -> tuple[str, str]:
        """Listen for gRPC and for scrapes; return both addresses."""
        metrics_server = MetricsServer(self._metrics_registry)
        self._stack.push_async_callback(metrics_server.stop)
        metrics_port = await metrics_server.start(self._options.host)
        server = create_server(self._options.secret)
        prefill_pb2_grpc.add_PrefillServicer_to_server(service, server)
        port = bind_port(server, self._options.host, 0)
        await server.start()
        self._stack.push_async_callback(self._stop_serving, server)
        address = f"{self._options.host}:{port}"
        metrics_address = f"{self._options.host}:{metrics_port}"
        logger.info("serving %s", fields(address=address, metrics_address=metrics_address))
        return address, metrics_address

    async def _register(self, parts: RankParts, address: str, metrics_address: str) -> None:
        self._registration = RegistryClient(
            self._options.router,
            self._options.secret,
            _record_of(parts, self._options, address, metrics_address),
            self._worker_load,
        )
        self._stack.push_async_callback(self._registration.close)
        await self._registration.start()

    async def _stop_serving(self, server: grpc.aio.Server) -> None:
        """End the engine loop first: its last events answer the calls that are still open."""
        await self._stop_loop()
        await server.stop(ANSWER_GRACE_S)

    async def _stop_loop(self) -> None:
        assert self._loop is not None
        if not self.is_stuck:
            is_group = self._options.config.prefill.dp > 1
            timeout_s = GROUP_JOIN_TIMEOUT_S if is_group else JOIN_TIMEOUT_S
            self.is_stuck = not await asyncio.to_thread(self._loop.stop, timeout_s)

    def _leave_groups(self, parts: RankParts) -> None:
        ended = None if self._runs is None else self._runs.loop_ended
        if ended is None or not ended.done() or ended.result().error is not None:
            # Others may be gone, and leaving in order takes all ranks; kernels may wait for them.
            self.is_stuck |= parts.model.groups.dims.world_size > 1
        if not self.is_stuck:
            parts.model.close_transfers()
            parts.model.groups.destroy()

    async def _close_tickets(self, parts: RankParts) -> None:
        """Stop sending, then tell decode of what will not come any more."""
        assert self._runs is not None
        await asyncio.to_thread(parts.send.sender.close)
        ended = self._runs.loop_ended
        # Where it has not ended in its time it was told to, and the request may go elsewhere.
        error = ended.result().error if ended.done() else None
        self._runs.close_left(0, failure_of_requests(self._options.rank_name, error))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._closer.flush()

    def _ticket_closed(self, closure: Closure) -> None:
        assert self._loop is not None
        self._loop.submit(RankClosed(0, closure))

    def _tell_router(self) -> None:
        if self._registration is not None:
            self._registration.set_draining()

    def _worker_load(self) -> registry_pb2.WorkerLoad:
        assert self._loop is not None
        return worker_load(self._loop.load)


def make_loop(
    parts: RankParts,
    options: WorkerOptions,
    emit: Callable[[Event], None],
    stalls: StallMeter,
    metrics: PrefillMetrics,
) -> EngineLoop:
    """The engine loop on a scheduler, the rank's model and the senders of all ranks it speaks for.

    `stalls` stands before the rank's own sender; `metrics` hear of the steps.
    """
    section, model = options.config.prefill, parts.model
    pool = BlockPool(
        model.kv_pool.num_blocks,
        section.block_size,
        enable_prefix_caching=section.enable_prefix_caching,
    )
    scheduler = Scheduler(
        pool,
        max_num_seqs=section.max_num_seqs,
        max_num_batched_tokens=section.max_num_batched_tokens,
    )
    followers, lockstep, groups = None, None, model.groups
    if section.tp > 1:
        followers = LeaderLink(groups.tp_group, parts.plan_shape, model.epoch)
    if section.dp > 1:
        lockstep = create_lockstep(groups.ep_group, model.epoch)
    return EngineLoop(
        scheduler,
        model.runner,
        SenderGroup(stalls, followers),
        emit,
        LoopSettings(
            max_model_len=model.max_model_len,
            push=parts.send.push,
            name=options.rank_name,
            max_ahead=section.max_ahead,
            step_limit_s=section.step_limit_s,
            enter_thread=partial(use_device, model.kv_pool.device),
        ),
        lockstep=lockstep,
        stalls=stalls,
        observe_gap=metrics.step_waited,
        observe_step=metrics.stepped,
    )


def worker_load(load: LoopLoad) -> registry_pb2.WorkerLoad:
    """The engine loop's load as the router sees it."""
    return registry_pb2.WorkerLoad(
        num_requests_running=load.num_running + load.num_sending,
        num_requests_waiting=load.num_waiting,
        num_tokens_waiting=load.num_tokens_waiting,
        num_free_blocks=load.num_free_blocks,
        num_total_blocks=load.num_total_blocks,
    )


def _identity_of(parts: RankParts, options: WorkerOptions) -> common_pb2.WorkerIdentity:
    return identity(options.instance, parts.model.epoch, options.rank)


def _limits_of(parts: RankParts, options: WorkerOptions) -> RunLimits:
    return RunLimits(
        identity=_identity_of(parts, options),
        layout_fingerprint=parts.send.layout.fingerprint(),
        block_size=parts.model.kv_pool.block_size,
        max_model_len=parts.model.max_model_len,
        vocab_size=parts.model.config.vocab_size,
        max_top_logprobs=parts.send.slot_layout.max_top_logprobs,
    )


def _record_of(
    parts: RankParts, options: WorkerOptions, address: str, metrics_address: str
) -> registry_pb2.WorkerRecord:
    config = options.config
    return registry_pb2.WorkerRecord(
        identity=_identity_of(parts, options),
        role=common_pb2.ROLE_PREFILL,
        address=address,
        num_ranks=config.prefill.num_ranks,
        num_parts=config.prefill.tp,
        model=options.served_name,
        max_model_len=parts.model.max_model_len,
        layout_fingerprint=parts.send.layout.fingerprint(),
        transport=config.kv_transfer.transport,
        block_size=config.prefill.block_size,
        metrics_address=metrics_address,
        pid=os.getpid(),
    )


def _emitter(runs: LiveRuns) -> Callable[[Event], None]:
    """Carries events from the engine loop's thread to the event loop."""
    event_loop = asyncio.get_running_loop()

    def emit(event: Event) -> None:
        # The event loop may be gone when the engine loop's last step outlives the shutdown.
        with contextlib.suppress(RuntimeError):
            event_loop.call_soon_threadsafe(runs.handle, event)

    return emit
