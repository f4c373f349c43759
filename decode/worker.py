"""A decode rank, as `worker.host` hosts it: what peers and routers reach of it.

Threads: the event loop (gRPC, frames, revocations), the engine loop, the receiver, the transport's
own. The engine loop is the only one that changes requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial

import grpc.aio

from decode.assembly import ModelSide, build_model_side, build_rank, build_transfer_side
from decode.bridge import RankBridge
from decode.frames import Delta
from decode.live import WriterOrder
from decode.loop import DecodeSteps, EngineLoop
from decode.metrics import DecodeMetrics
from decode.outboxes import Outboxes
from decode.places import Places
from decode.rank import DecodeRank
from decode.revoke import RevokeCalls, Revoker
from decode.service import DecodeService
from decode.spans import record_request
from decode.validation import RankFacts
from engine.boot.rank import use_device
from engine.experts.votes import ExpertTurns, StandingExperts
from grammar.constraints import Constraints
from kv_transfer.receiver import Arrival
from runtime.errors import DrainingError, PeerLostError
from runtime.pb import cache_pb2_grpc, common_pb2, decode_pb2, decode_pb2_grpc, registry_pb2
from runtime.rpc.call_server import CallServer, CarriedMethod
from runtime.stragglers.rank_picture import block_to_proto
from runtime.trace.otlp import open_spans
from worker.arguments import WorkerOptions
from worker.cache_log import CacheFeed
from worker.cache_service import CacheService
from worker.expert_load import open_expert_load, told_of
from worker.expert_moves import ExpertMoves, open_expert_moves
from worker.expert_service import add_experts
from worker.health import thread_check
from worker.host import Endpoint, HostedRank, Loop, WorkerHost
from worker.step_driver import LoopOptions, steps_ahead

FLUSH_S = 2.0
"""How long routers may take to read their last frames when the process ends."""


class DecodeDriver:
    """See `worker.host.RoleDriver`."""

    def __init__(
        self,
        options: WorkerOptions,
        build_model: Callable[[WorkerOptions], ModelSide] = build_model_side,
    ) -> None:
        """`build_model` blocks: it runs on a thread of its own."""
        self._options, self._build_model = options, build_model
        self._moves: ExpertMoves | None = None

    def boot(self) -> HostedRank:
        """Boot the rank, and let its memory be written."""
        self._side = side = self._build_model(self._options)
        self._transfer = build_transfer_side(self._options, side, self._arrived)
        model = self._options.config.model
        self._constraints = Constraints(model.path, side.vocab_size)
        if model.warm_grammars:
            self._constraints.warm()
        side.groups.boot_group.barrier()  # registering may take one rank longer than another
        return HostedRank(
            groups=side.groups,
            epoch=side.epoch,
            max_model_len=side.max_model_len,
            close_transfer=self._transfer.close,
            close_model=side.close,
            settle=side.settle,
        )

    def build(self, host: WorkerHost, closing: contextlib.AsyncExitStack) -> tuple[Loop, Endpoint]:
        """Make the service, the engine loop, and what carries between them."""
        self._host, self._event_loop = host, asyncio.get_running_loop()
        self._closing = closing
        settings = self._options.config.kv_transfer
        self._metrics = metrics = DecodeMetrics(host.registry)
        self._transfer.watch(host.registry)
        rank = build_rank(self._options, self._side, self._transfer, metrics, self._order)
        self._load = rank.load()
        self._record_spans(rank, host, closing)
        self._cache = CacheFeed(rank.pool, lambda work: engine.post(work))
        self._experts = open_expert_load(self._side.experts, lambda work: engine.post(work))
        engine = self._make_loop(rank, metrics)
        host.health.watch_loop(engine)
        if self._experts is not None:
            self._experts.watch(host.registry)
        if self._moves is not None:
            self._moves.watch(host.registry, host.health)
        host.health.add("receiver", thread_check(lambda: self._transfer.receiver.is_alive))
        self._bridge = RankBridge(engine, rank)
        self._places = Places(self._options.config.decode.num_places)
        self._outboxes = Outboxes(
            self._bridge.abort_router, time.monotonic, places=self._places, on_gap=self._abort_lost
        )
        closing.callback(self._constraints.close)
        calls = RevokeCalls(self._options.credentials)
        closing.push_async_callback(calls.close)
        self._revoker = Revoker(
            self._bridge,
            calls,
            self._transfer.fences.fence,
            decode=host.identity,
            ticket_timeout_s=settings.transfer_timeout_s,
            quarantine_timeout_s=settings.quarantine_timeout_s,
        )
        closing.push_async_callback(self._revoker.close)
        endpoint = Endpoint(
            serve=self._serve,
            record=registry_pb2.WorkerRecord(
                role=common_pb2.ROLE_DECODE,
                layout_fingerprint=self._transfer.layout.fingerprint(),
                max_num_requests=self._options.config.decode.num_places,
                kv_block_bytes=self._side.kv_pool.block_bytes,
                has_experts=self._experts is not None,
            ),
            load=self._renewed_load,
            refuse=lambda: self._service.refuse_new(),
            drain=self._drain,
            sweep=self._sweep,
            flush=self._flush,
        )
        return engine, endpoint

    def _record_spans(
        self, rank: DecodeRank, host: WorkerHost, closing: contextlib.AsyncExitStack
    ) -> None:
        """Of requests that are over, where somebody wants them."""
        options = self._options
        name = f"{options.instance}/{options.rank}"
        tracing = options.config.tracing
        spans = open_spans(tracing, host.registry, role="decode", instance=name)
        if spans is None:
            return
        closing.push_async_callback(asyncio.to_thread, spans.close)
        rank.live.on_forgotten(
            lambda request, reason: record_request(spans, request, reason, time.monotonic())
        )

    def _make_loop(self, rank: DecodeRank, metrics: DecodeMetrics) -> EngineLoop:
        section, name, side = self._options.config.decode, self._options.rank_name, self._side
        steps = DecodeSteps(
            rank,
            side.runner,
            metrics=metrics,
            publish=self._publish,
            name=name,
            tell_cache=self._cache.tell,
            budget=side.budget,
            waits=side.waits,
        )
        options = LoopOptions(
            name=name,
            step="decode",
            max_ahead=steps_ahead(section.max_ahead, launch_waits=side.launch_waits),
            limit_s=lambda num_tokens: section.step_timeout_s,
            enter_thread=partial(use_device, side.kv_pool.device),
            launched=self._behind_steps(),
            device_wait=nullcontext if side.waits is None else side.waits.device_wait,
            experts=self._moving(),
        )
        return EngineLoop(steps, side.lockstep, options)

    def _behind_steps(self) -> Callable[[], None]:
        """What the loop calls behind every step: what was counted and recorded is read."""
        tell, waits = told_of(self._experts), self._side.waits
        if waits is None:
            return tell

        def launched() -> None:
            tell()
            waits.launched()

        return launched

    def _moving(self) -> ExpertTurns:
        """What moves experts between steps, where they may."""
        moves, feed = self._side.moves, self._experts
        if moves is None or feed is None:
            return StandingExperts()
        epoch = self._side.epoch
        opened = open_expert_moves(self._options, moves, feed.experts, feed, epoch=epoch)
        self._closing.callback(opened.close)
        self._moves = opened
        return opened.rebalancer

    def _serve(self, server: grpc.aio.Server, calls: CallServer, address: str) -> None:
        identity, transport = self._host.identity, self._options.config.kv_transfer.transport
        facts = RankFacts(
            identity=identity,
            address=address,
            transport=transport,
            layout=self._transfer.layout,
            slots=self._transfer.slots.layout,
            vocab_size=self._side.vocab_size,
            max_model_len=self._side.max_model_len,
            num_usable_blocks=self._side.kv_pool.num_blocks - 1,
            endpoint=lambda prefill: self._transfer.endpoint_for(
                prefill, identity, transport, self._side.kv_pool.nbytes
            ),
        )
        self._service = DecodeService(
            facts,
            self._bridge,
            self._outboxes,
            places=self._places,
            constraints=self._constraints,
            metrics=self._metrics,
            load=lambda: self._load,
            on_drain=self._host.tell_draining,
        )
        decode_pb2_grpc.add_DecodeServicer_to_server(self._service, server)
        reserve = CarriedMethod(decode_pb2.ReserveRequest.FromString, self._service.Reserve)
        calls.carry("Decode", Reserve=reserve)
        cache = CacheService(identity, self._cache, self._worker_load)
        cache_pb2_grpc.add_CacheServicer_to_server(cache, server)
        add_experts(server, identity, self._options, self._experts)

    def _worker_load(self) -> registry_pb2.WorkerLoad:
        metrics = self._metrics
        load = registry_pb2.WorkerLoad()
        load.CopyFrom(self._load)
        load.num_tokens_done = metrics.num_tokens
        load.num_steps_done = metrics.num_steps
        load.num_requests_done = metrics.num_requests
        load.busy_s, load.clock_s = metrics.busy_s, time.monotonic()
        metrics.drafts.tell(load)
        for peer, (num_bytes, seconds) in metrics.transfers.received().items():
            load.received.add(peer=peer, num_bytes=num_bytes, seconds=seconds)
        return load

    def _renewed_load(self) -> registry_pb2.WorkerLoad:
        """For renewals, which alone tell how long the ranks wait for one another."""
        load, waits = self._worker_load(), self._side.waits
        if waits is not None:
            load.waits.extend(block_to_proto(block) for block in waits.blocks)
        return load

    async def _drain(self, deadline_s: float) -> None:
        await self._service.start_drain(deadline_s)
        await self._service.wait_until_empty()

    async def _sweep(self) -> None:
        """Look after routers and quarantine."""
        self._outboxes.sweep()
        with contextlib.suppress(DrainingError):  # the engine loop has just ended
            await self._revoker.sweep()

    async def _flush(self) -> None:
        self._outboxes.close()
        end = time.monotonic() + FLUSH_S
        while self._outboxes.num_pending_deltas and time.monotonic() < end:
            await asyncio.sleep(0.01)

    def _abort_lost(self, request_id: str) -> None:
        error = PeerLostError("its tokens are not kept any more: it cannot be continued")
        self._bridge.abort_soon(request_id, error)

    # Called on other threads.

    def _arrived(self, arrival: Arrival) -> None:
        self._bridge.arrived(arrival)

    def _order(self, order: WriterOrder) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: so is the transport
            self._event_loop.call_soon_threadsafe(self._revoker.order, order)

    def _publish(self, news: Mapping[str, list[Delta]], load: registry_pb2.WorkerLoad) -> None:
        self._load = load
        if news:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody reads
                self._event_loop.call_soon_threadsafe(self._outboxes.put, news)
