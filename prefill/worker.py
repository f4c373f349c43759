"""A prefill rank that takes requests, as `worker.host` hosts it.

Rank 0 of a tensor-parallel instance, which speaks for all its ranks (the others are
`prefill.follower_worker`), or any rank of a data-parallel one, which speaks for itself alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial

import grpc.aio

from engine.boot.rank import use_device
from engine.experts.counted import CountedExperts
from engine.experts.votes import ExpertTurns, StandingExperts
from engine.parallel.lockstep import create_lockstep
from grammar.constraints import Constraints
from prefill.assembly import build_rank, build_scheduler
from prefill.claims import Claims, cancel_of_unknown
from prefill.closer import TicketCloser
from prefill.group_counter import GroupCounter
from prefill.live_runs import LiveRun, LiveRuns
from prefill.loop import EngineLoop, LoopSettings
from prefill.messages import Command, Event, LoopEnded, RankClosed
from prefill.metrics import PrefillMetrics
from prefill.nonces import NonceMemory
from prefill.peers import ChannelCache, Greeting, PeerDirectory
from prefill.rank_link import LeaderLink
from prefill.rank_plan import Closure
from prefill.renewals import TicketRenewer
from prefill.sender_group import SenderGroup
from prefill.service import PrefillService
from prefill.spans import record_run
from prefill.stall import StallMeter
from prefill.validation import RunLimits
from runtime.net.roles import Role
from runtime.pb import cache_pb2_grpc, common_pb2, prefill_pb2, prefill_pb2_grpc, registry_pb2
from runtime.rpc.call_server import CallServer, CarriedMethod
from runtime.rpc.grpc_calls import open_channel
from runtime.rpc.wire import tier_tokens_to_proto
from runtime.trace.otlp import open_spans
from worker.arguments import WorkerOptions
from worker.cache_log import CacheFeed
from worker.cache_service import CacheService
from worker.expert_load import open_expert_load, told_of
from worker.expert_moves import ExpertMoves, open_expert_moves
from worker.expert_service import add_experts
from worker.health import thread_check
from worker.host import Endpoint, HostedRank, Loop, WorkerHost
from worker.step_driver import steps_ahead

FLUSH_TIMEOUT_S = 3.0


class PrefillDriver:
    """See `worker.host.RoleDriver`."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._num_reports = 0
        self._moves: ExpertMoves | None = None
        self._link: LeaderLink | None = None

    def boot(self) -> HostedRank:
        """Boot the rank."""
        self._parts = build_rank(self._options, self._ticket_closed)
        model = self._options.config.model
        self._constraints = Constraints(model.path, self._parts.model.config.vocab_size)
        if model.warm_grammars:
            self._constraints.warm()
        return self._parts.hosted()

    def build(self, host: WorkerHost, closing: contextlib.AsyncExitStack) -> tuple[Loop, Endpoint]:
        """Make the service, the engine loop, and what carries between them."""
        options, send = self._options, self._parts.send
        self._metrics = metrics = PrefillMetrics(host.registry)
        nonces = NonceMemory(time.monotonic)
        connect = partial(open_channel, credentials=options.credentials, to=Role.DECODE)
        channels = ChannelCache(connect)
        closing.push_async_callback(channels.close)
        self._closer = closer = TicketCloser(channels)
        peers = self._meet_peers(host, channels)
        claims = self._make_claims(host, channels, peers)
        closing.push_async_callback(claims.close)
        self._runs = runs = LiveRuns(
            host.identity,
            options.config.prefill.tp,
            nonces=nonces,
            claims=claims,
            closer=closer,
            metrics=metrics,
            forget_peer=peers.forget,
            on_finished=self._on_finished(host, closing),
        )
        closing.push_async_callback(self._close_tickets)
        self._runs, self._event_loop = runs, asyncio.get_running_loop()
        self._loop = loop = self._make_loop(metrics)
        metrics.watch(lambda: loop.load, lambda: closer.num_dropped)
        send.watch(host.registry)
        host.health.watch_loop(loop.steps)
        if self._experts is not None:
            self._experts.watch(host.registry)
        if self._moves is not None:
            closing.callback(self._moves.close)
            self._moves.watch(host.registry, host.health)
        host.health.add("sender_lanes", thread_check(lambda: send.sender.is_alive))
        closing.callback(self._constraints.close)
        service = PrefillService(
            self._limits(host),
            runs,
            nonces,
            loop.submit,
            constraints=self._constraints,
            num_tokens_left=lambda: loop.load.num_tokens_waiting,
            on_draining=host.tell_draining,
        )
        endpoint = Endpoint(
            serve=partial(self._serve, host, service),
            record=registry_pb2.WorkerRecord(
                role=common_pb2.ROLE_PREFILL,
                num_parts=options.config.prefill.tp,
                layout_fingerprint=send.layout.fingerprint(),
                has_experts=self._experts is not None,
            ),
            load=self._worker_load,
            refuse=service.start_draining,
            drain=partial(_drain, service, runs),
        )
        return loop.steps, endpoint

    def _meet_peers(self, host: WorkerHost, channels: ChannelCache) -> PeerDirectory:
        send, config = self._parts.send, self._options.config
        greeting = Greeting(
            identity=host.identity,
            num_ranks=config.prefill.tp,
            transport=config.kv_transfer.transport,
            layout=send.layout,
            slot_bytes=send.slot_layout.slot_bytes,
        )
        return PeerDirectory(greeting, channels)

    def _make_claims(
        self, host: WorkerHost, channels: ChannelCache, peers: PeerDirectory
    ) -> Claims:
        renewer = TicketRenewer(
            host.identity, channels, lambda nonce: self._submit(cancel_of_unknown(nonce))
        )
        block_size = self._parts.send.layout.block_size
        return Claims(peers, renewer, self._submit, block_size=block_size, clock=time.monotonic)

    def _on_finished(
        self, host: WorkerHost, closing: contextlib.AsyncExitStack
    ) -> Callable[[LiveRun], None]:
        """What hears of runs that are over: their spans, where somebody wants them."""
        options = self._options
        name = f"{options.instance}/{options.rank}"
        tracing = options.config.tracing
        spans = open_spans(tracing, host.registry, role="prefill", instance=name)
        if spans is None:
            return lambda run: None
        closing.push_async_callback(asyncio.to_thread, spans.close)
        return lambda run: record_run(spans, run, time.monotonic())

    def _make_loop(self, metrics: PrefillMetrics) -> EngineLoop:
        """On a scheduler, the rank's model and the senders of all ranks that we speak for."""
        section, parts, model = self._options.config.prefill, self._parts, self._parts.model
        lockstep, groups = None, model.groups
        counts = self._group_counter(model.experts)
        self._experts = open_expert_load(
            model.experts, lambda work: self._loop.steps.post(work), counts
        )
        moving = self._open_moves()
        if section.tp > 1:
            self._link = LeaderLink(groups.tp_group, parts.plan_shape, model.epoch, moving)
        if section.dp > 1:
            lockstep = create_lockstep(groups.ep_group, model.epoch)
        stalls = StallMeter(parts.send.sender, metrics.step_stalled)
        scheduler = build_scheduler(section, model.kv_pool.num_blocks)
        self._cache = CacheFeed(scheduler.pool, lambda work: self._loop.steps.post(work))
        return EngineLoop(
            scheduler,
            model.runner,
            SenderGroup(stalls, self._link),
            _emitter(self._runs),
            LoopSettings(
                max_model_len=model.max_model_len,
                push=parts.send.push,
                name=self._options.rank_name,
                max_ahead=steps_ahead(section.max_ahead, launch_waits=model.launch_waits),
                step_limit_s=section.step_limit_s,
                enter_thread=partial(use_device, model.kv_pool.device),
                launched=told_of(self._experts),
                experts=StandingExperts() if self._link else moving,
            ),
            lockstep=lockstep,
            stalls=stalls,
            observe_gap=metrics.step_waited,
            observe_step=metrics.stepped,
            tell_cache=self._cache.tell,
        )

    def _group_counter(self, experts: CountedExperts | None) -> GroupCounter | None:
        """What reads the counts of the ranks that we speak for; None where these are our own."""
        if experts is None or experts.sharing.size == 1:
            return None
        watch = partial(self._watch, "adding up what the experts of all ranks got")
        return GroupCounter(experts, self._tell_to_count, watch)

    def _tell_to_count(self) -> None:
        assert self._link is not None
        self._link.count()

    def _watch(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self._loop.steps.watch(what)

    def _open_moves(self) -> ExpertTurns:
        """What moves experts between steps, where they may."""
        model, feed = self._parts.model, self._experts
        if model.moves is None or feed is None:
            return StandingExperts()
        self._moves = open_expert_moves(
            self._options, model.moves, feed.experts, feed, epoch=model.epoch
        )
        return self._moves.rebalancer

    def _serve(
        self,
        host: WorkerHost,
        service: PrefillService,
        server: grpc.aio.Server,
        calls: CallServer,
        address: str,
    ) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(service, server)
        calls.carry("Prefill", Run=CarriedMethod(prefill_pb2.RunRequest.FromString, service.Run))
        cache = CacheService(host.identity, self._cache, self._worker_load)
        cache_pb2_grpc.add_CacheServicer_to_server(cache, server)
        add_experts(server, host.identity, self._options, self._experts)

    def _limits(self, host: WorkerHost) -> RunLimits:
        model, send = self._parts.model, self._parts.send
        return RunLimits(
            identity=host.identity,
            block_size=model.kv_pool.block_size,
            max_model_len=model.max_model_len,
            vocab_size=model.config.vocab_size,
            max_top_logprobs=send.slot_layout.max_top_logprobs,
        )

    def _worker_load(self) -> registry_pb2.WorkerLoad:
        load, metrics = self._loop.load, self._metrics
        self._num_reports += 1
        return registry_pb2.WorkerLoad(
            num_requests_running=load.num_running + load.num_sending,
            num_requests_waiting=load.num_waiting,
            num_tokens_waiting=load.num_tokens_waiting,
            tokens_by_tier=tier_tokens_to_proto(load.tokens_by_tier),
            num_free_blocks=load.num_free_blocks,
            num_total_blocks=load.num_total_blocks,
            num_tokens_done=metrics.num_tokens,
            num_steps_done=metrics.num_steps,
            busy_s=metrics.busy_s,
            sequence=self._num_reports,
            clock_s=time.monotonic(),
        )

    async def _close_tickets(self) -> None:
        """Stop sending, then tell decode of what will not come any more."""
        await asyncio.to_thread(self._parts.send.sender.close)
        # A loop that has not ended in its time was told to, and the requests may go elsewhere.
        ended = self._runs.loop_ended
        last = ended.result() if ended.done() else LoopEnded(self._options.rank_name, None)
        self._runs.close_left(0, last.failure_of())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._closer.flush()

    def _ticket_closed(self, closure: Closure) -> None:
        if not closure.drained:
            # Past the engine loop, which may have ended and then hears of nothing.
            self._event_loop.call_soon_threadsafe(self._runs.note_undrained, closure.nonce)
        self._submit(RankClosed(0, closure))

    def _submit(self, command: Command) -> None:
        self._loop.submit(command)


async def _drain(service: PrefillService, runs: LiveRuns, deadline_s: float) -> None:
    """Give back what has not begun, at once, and what is left when the time is over."""
    service.start_draining(deadline_s)
    await runs.wait_empty()


def _emitter(runs: LiveRuns) -> Callable[[Event], None]:
    """Carries events from the engine loop's thread to the event loop."""
    event_loop = asyncio.get_running_loop()

    def emit(event: Event) -> None:
        # The event loop may be gone when the engine loop's last step outlives the shutdown.
        with contextlib.suppress(RuntimeError):
            event_loop.call_soon_threadsafe(runs.handle, event)

    return emit
