"""The decode worker process: boots one rank, keeps it in the router's pool, ends it in order.

Threads: the event loop (gRPC, frames, revocations), the engine loop, the receiver, the transport's
own. The engine loop is the only one that changes requests. If it fails, the process answers every
request, and exits non-zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from functools import partial

import grpc.aio

from decode.assembly import (
    ModelSide,
    TransferSide,
    build_metrics,
    build_model_side,
    build_rank,
    build_transfer_side,
)
from decode.border import RankFacts
from decode.bridge import RankBridge
from decode.frames import Delta
from decode.live import WriterOrder
from decode.loop import EngineLoop
from decode.outboxes import Outboxes
from decode.places import Places
from decode.revoke import Revoker
from decode.service import DecodeService
from engine.boot import use_device
from kv_transfer.receiver import Arrival
from kv_transfer.transport import peer_name
from runtime.daemon import run_on_daemon
from runtime.errors import DrainingError, PeerLostError, TandemError
from runtime.logging import fields, get_logger
from runtime.metrics import MetricsServer, gauge_of
from runtime.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, registry_pb2
from runtime.pb.common_pb2 import ROLE_DECODE, WorkerIdentity
from runtime.registration import RegistryClient
from runtime.rpc import bind_port, create_server, map_rpc_errors, open_channel
from runtime.wire import identity
from runtime.worker import WorkerOptions

logger = get_logger(__name__)

SWEEP_INTERVAL_S = 1.0
DRAIN_S = 8.0
"""How long requests may go on after the first signal. What is left then is given back to the
routers, which still have to hear of it within the grace period (`__main__.GRACE_S`)."""
FLUSH_S = 2.0
"""How long routers may take to read their last frames when the process ends."""
STOP_TIMEOUT_S = 12.0
"""How long other ranks of the group may take to end their work; longer than their grace period."""


class DecodeWorker:
    """One rank as a service: see `runtime.service.Service`."""

    def __init__(
        self,
        options: WorkerOptions,
        build_model: Callable[[WorkerOptions], ModelSide] = build_model_side,
    ) -> None:
        """`build_model` blocks: it runs on a thread of its own."""
        self._options = options
        self._build_model = build_model
        self._membership: RegistryClient | None = None
        self._load = decode_pb2.LoadReport()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._exit = contextlib.AsyncExitStack()
        self.is_stuck = False
        """The boot or the engine loop did not end, or the device may hang, or the ranks of the
        group did not end together: nobody may wait for them, and no destructor run."""

    async def startup(self) -> None:
        """Boot; on return the rank is in the router's pool."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[TandemError | None] = self._loop.create_future()
        self._registry, self._metrics = build_metrics()
        self.is_stuck = True  # unless the boot ends well
        side = await run_on_daemon(partial(self._build_model, self._options), name="boot")
        self._exit.callback(self._leave_groups, side)
        transfer = self._open_transfer(side)
        # Registering memory may take one rank longer than another; from here on steps are watched.
        await run_on_daemon(side.groups.boot_group.barrier, name="boot-barrier")
        self.is_stuck = False
        self._start_engine(side, transfer)
        address = await self._serve(side, transfer)
        await self._register(side, transfer, address)
        logger.info("ready %s", fields(address=address, epoch=f"{side.epoch:016x}"))

    async def main_loop(self) -> None:
        """Look after routers and quarantine until the engine loop ends; raise what ended it."""
        while not self._ended.done():
            await asyncio.wait({self._ended}, timeout=SWEEP_INTERVAL_S)
            if not self._ended.done():
                self._outboxes.sweep()
                with contextlib.suppress(DrainingError):  # the engine loop has just ended
                    await self._revoker.sweep()
        error = self._ended.result()
        if error is not None:
            raise error

    async def drain(self) -> None:
        """Refuse new requests; return when nothing is left."""
        await self._service.start_drain(DRAIN_S)
        await self._service.wait_until_empty()

    async def shutdown(self) -> None:
        """Undo `startup`, last things first."""
        await self._exit.aclose()

    def _open_transfer(self, side: ModelSide) -> TransferSide:
        transfer = build_transfer_side(self._options, side, self._arrived)
        self._exit.callback(transfer.transport.close)
        self._exit.callback(transfer.receiver.close)
        return transfer

    def _start_engine(self, side: ModelSide, transfer: TransferSide) -> None:
        settings = self._options.config.kv_transfer
        rank = build_rank(self._options, side, transfer, self._metrics, self._order)
        self._engine = EngineLoop(
            rank,
            side.runner,
            side.lockstep,
            metrics=self._metrics,
            publish=self._publish,
            on_end=self._engine_ended,
            max_ahead=self._options.config.decode.max_ahead,
            step_timeout_s=self._options.config.decode.step_timeout_s,
            name=self._options.rank_name,
        )
        self._bridge = RankBridge(self._engine, rank)
        self._places = Places(self._options.config.decode.max_num_reserved)
        self._outboxes = Outboxes(
            self._bridge.abort_router, time.monotonic, places=self._places, on_gap=self._abort_lost
        )
        self._revoker = Revoker(
            self._bridge,
            self._call_revoke,
            transfer.fences.fence,
            decode=identity(self._options.instance, side.epoch, self._options.rank),
            ticket_timeout_s=settings.transfer_timeout_s,
            quarantine_timeout_s=settings.quarantine_timeout_s,
        )
        self._load = rank.load()
        self._engine.submit(partial(use_device, side.kv_pool.device))
        self._engine.start()
        self._exit.push_async_callback(self._close_channels)
        self._exit.push_async_callback(self._revoker.close)

    async def _serve(self, side: ModelSide, transfer: TransferSide) -> str:
        """Listen; returns the address that peers reach us at."""
        server = create_server(self._options.secret)
        port = bind_port(server, self._options.host, 0)
        address = f"{self._options.host}:{port}"
        facts = _facts(self._options, side, transfer, address)
        self._service = DecodeService(
            facts,
            self._bridge,
            self._outboxes,
            places=self._places,
            metrics=self._metrics,
            load=lambda: self._load,
            on_drain=self._tell_draining,
        )
        decode_pb2_grpc.add_DecodeServicer_to_server(self._service, server)
        await server.start()
        self._exit.push_async_callback(self._stop_serving, server)
        self._watch(transfer)
        metrics = MetricsServer(self._registry)
        self._metrics_port = await metrics.start(self._options.host)
        self._exit.push_async_callback(metrics.stop)
        return address

    def _watch(self, transfer: TransferSide) -> None:
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "registered_bytes": (
                "Memory that is registered with the transport",
                lambda: transfer.transport.registered_bytes,
            ),
            "metadata_slots_in_use": (
                "Slots of open and quarantined tickets",
                lambda: transfer.slots.num_slots - transfer.slots.num_free,
            ),
        }
        for name, (documentation, read) in gauges.items():
            gauge_of(self._registry, f"pd_kv_transfer_{name}", documentation, read)

    async def _register(self, side: ModelSide, transfer: TransferSide, address: str) -> None:
        options = self._options
        record = registry_pb2.WorkerRecord(
            identity=identity(options.instance, side.epoch, options.rank),
            role=ROLE_DECODE,
            address=address,
            num_ranks=options.config.decode.dp,
            model=options.served_name,
            max_model_len=side.max_model_len,
            layout_fingerprint=transfer.layout.fingerprint(),
            transport=options.config.kv_transfer.transport,
            block_size=options.config.decode.block_size,
            metrics_address=f"{options.host}:{self._metrics_port}",
            pid=os.getpid(),
        )
        self._membership = RegistryClient(options.router, options.secret, record, self._worker_load)
        self._exit.push_async_callback(self._membership.close)
        await self._membership.start()

    async def _stop_serving(self, server: grpc.aio.Server) -> None:
        """End the engine loop, which answers everybody; let the routers read; stop listening."""
        self._service.refuse_new()
        self.is_stuck = not await asyncio.to_thread(self._engine.stop, STOP_TIMEOUT_S)
        self._outboxes.close()
        end = time.monotonic() + FLUSH_S
        while self._outboxes.num_pending_deltas and time.monotonic() < end:
            await asyncio.sleep(0.01)
        await server.stop(grace=0.5)

    def _leave_groups(self, side: ModelSide) -> None:
        if not (self._ended.done() and self._ended.result() is None):
            # Others may be gone, and leaving in order takes all ranks; kernels may wait for them.
            self.is_stuck |= side.groups.dims.world_size > 1
        if not self.is_stuck:
            side.close_steps()
            side.close_transfers()
            side.groups.destroy()

    async def _close_channels(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)

    async def _call_revoke(
        self, address: str, request: prefill_pb2.RevokeRequest, timeout_s: float
    ) -> bool:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, self._options.secret)
        with map_rpc_errors(f"prefill worker at {address}", request.request_id):
            stub = prefill_pb2_grpc.PrefillStub(channel)
            response: prefill_pb2.RevokeResponse = await stub.Revoke(request, timeout=timeout_s)
        return response.drained

    def _worker_load(self) -> registry_pb2.WorkerLoad:
        load = self._load
        return registry_pb2.WorkerLoad(
            num_requests_running=load.num_requests_running,
            num_requests_waiting=load.num_requests_waiting,
            num_free_blocks=load.num_free_blocks,
            num_total_blocks=load.num_total_blocks,
            num_quarantined_blocks=load.num_quarantined_blocks,
        )

    def _abort_lost(self, request_id: str) -> None:
        error = PeerLostError("its tokens are not kept any more: it cannot be continued")
        self._bridge.abort_soon(request_id, error)

    def _tell_draining(self) -> None:
        logger.info("draining")
        if self._membership is not None:
            self._membership.set_draining()

    # Called on other threads.

    def _arrived(self, arrival: Arrival) -> None:
        self._bridge.arrived(arrival)

    def _order(self, order: WriterOrder) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: so is the transport
            self._loop.call_soon_threadsafe(self._revoker.order, order)

    def _publish(self, news: Mapping[str, list[Delta]], load: decode_pb2.LoadReport) -> None:
        self._load = load
        if news:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody reads
                self._loop.call_soon_threadsafe(self._outboxes.put, news)

    def _engine_ended(self, error: TandemError | None) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the end is known
            self._loop.call_soon_threadsafe(_set_once, self._ended, error)


def _set_once(future: asyncio.Future[TandemError | None], error: TandemError | None) -> None:
    if not future.done():
        future.set_result(error)


def _facts(
    options: WorkerOptions, side: ModelSide, transfer: TransferSide, address: str
) -> RankFacts:
    decode = identity(options.instance, side.epoch, options.rank)
    transport_name = options.config.kv_transfer.transport

    def endpoint(prefill: WorkerIdentity) -> decode_pb2.PeerEndpoint:
        # In this order: should a fence come between, the endpoint is void and the sender asks
        # again. The other way round it would pass for one of before the fence, and be good.
        opaque = transfer.transport.endpoint()
        return decode_pb2.PeerEndpoint(
            decode=decode,
            transport=transport_name,
            endpoint=opaque,
            kv_region_bytes=side.kv_pool.nbytes,
            metadata_region_bytes=transfer.slots.nbytes,
            metadata_slot_bytes=transfer.slots.layout.slot_bytes,
            fence_generation=transfer.fences.generation_of(
                peer_name(prefill.instance, prefill.epoch, prefill.rank)
            ),
        )

    return RankFacts(
        identity=decode,
        address=address,
        transport=transport_name,
        layout=transfer.layout,
        slots=transfer.slots.layout,
        vocab_size=side.vocab_size,
        max_model_len=side.max_model_len,
        num_usable_blocks=side.kv_pool.num_blocks - 1,
        endpoint=endpoint,
    )
