"""A prefill service over real gRPC: real engine loop, fake model, fake senders, fake decode."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry

from engine.memory.block_pool import BlockPool
from grammar.constraints import Constraints
from prefill.claims import Claims, cancel_of_unknown
from prefill.closer import TicketCloser
from prefill.kv_push import PushSettings
from prefill.live_runs import LiveRuns
from prefill.loop import EngineLoop, LoopSettings
from prefill.messages import Command, Event, RankClosed, StopLoop
from prefill.metrics import PrefillMetrics
from prefill.nonces import NonceMemory
from prefill.peers import ChannelCache, Greeting, PeerDirectory
from prefill.renewals import TicketRenewer
from prefill.scheduler import Scheduler
from prefill.sender_group import SenderGroup
from prefill.service import PrefillService
from prefill.validation import RunLimits
from runtime.pb import common_pb2, decode_pb2, prefill_pb2, prefill_pb2_grpc
from runtime.rpc.grpc_calls import bind_port, create_server, open_channel
from tests.grammar.fakes import FakeCompiler
from tests.prefill.fake_decode import (
    CREDENTIALS,
    LAYOUT,
    LISTEN,
    SLOT_BYTES,
    FakeDecode,
    serve_decode,
)
from tests.prefill.fakes import BLOCK_SIZE, FakeRunner, FakeTicketSender

IDENTITY = common_pb2.WorkerIdentity(instance="prefill-0", epoch=5)
SAMPLING = common_pb2.SamplingParams(
    top_p=1.0, repetition_penalty=1.0, max_tokens=8, num_logprobs=-1, num_prompt_logprobs=-1
)
LIMITS = RunLimits(
    identity=IDENTITY,
    block_size=BLOCK_SIZE,
    max_model_len=64,
    vocab_size=1000,
    max_top_logprobs=20,
)


@dataclass
class Gate:
    """Holds the engine loop before a step until it is opened."""

    opened: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(60.0)


@dataclass
class ServiceBench:
    """Everything that a test looks at."""

    stub: prefill_pb2_grpc.PrefillStub
    decode: FakeDecode
    claims: Claims
    service: PrefillService
    runs: LiveRuns
    nonces: NonceMemory
    runner: FakeRunner
    sender: FakeTicketSender
    scheduler: Scheduler
    loop: EngineLoop
    registry: CollectorRegistry
    drains: list[int]
    given_up: list[int]

    def request(self, nonce: int, num_tokens: int = 6, **changes: object) -> prefill_pb2.RunRequest:
        """A good call; `changes` replace fields, `place_...` those of the reservation."""
        context = changes.get("context_token_ids", range(num_tokens))
        assert isinstance(context, list | range)
        reservation = self.decode.reserve(nonce, list(range(1, 1 - (-len(context) // BLOCK_SIZE))))
        request = prefill_pb2.RunRequest(
            request_id=f"request-{nonce}",
            expected=IDENTITY,
            context_token_ids=range(num_tokens),
            sampling=SAMPLING,
            timeout_s=30.0,
        )
        for name, value in changes.items():
            target = reservation if name.startswith("place_") else request
            set_field(target, name.removeprefix("place_"), value)
        request.reservation.CopyFrom(reservation)
        return request

    async def run(self, nonce: int, num_tokens: int = 6, **changes: object) -> object:
        """Call Run; the FirstToken or the Error."""
        response = await self.stub.Run(self.request(nonce, num_tokens, **changes), timeout=240)
        return getattr(response, response.WhichOneof("result"))

    async def drain_senders(self) -> None:
        """Complete what the senders have in flight, until no call is left."""
        async with asyncio.timeout(60):
            while len(self.runs):
                self.sender.close_all()
                await asyncio.sleep(0.005)
        await self.runs.wait_empty()

    def assert_empty(self) -> None:
        """Nothing is left: no call, no claim, no request, no block."""
        assert len(self.runs) == 0
        assert len(self.claims) == 0
        assert self.scheduler.num_requests == 0
        self.scheduler.check_integrity()

    def outcomes(self) -> list[tuple[int, str]]:
        """(nonce, outcome) of the parts that decode was told of."""
        name = decode_pb2.TicketOutcome.Name
        return [
            (closure.nonce, name(part.outcome).removeprefix("TICKET_OUTCOME_"))
            for closure in self.decode.closures
            for part in closure.parts
        ]


def set_field(message: object, name: str, value: object) -> None:
    """Replace a field of a protobuf message, whatever its kind."""
    message.ClearField(name)  # type: ignore[attr-defined]
    if isinstance(value, list | range):
        getattr(message, name).extend(value)
    elif hasattr(value, "CopyFrom"):
        getattr(message, name).CopyFrom(value)
    else:
        setattr(message, name, value)


def make_claims(
    channels: ChannelCache, submit: Callable[[Command], None], given_up: list[int]
) -> tuple[Claims, PeerDirectory]:
    """Claims of a worker of one rank, and the decode ranks that it meets.

    `given_up` gets the nonces that decode does not know, once the engine loop is told.
    """

    def on_unknown(nonce: int) -> None:
        submit(cancel_of_unknown(nonce))
        given_up.append(nonce)

    greeting = Greeting(
        identity=IDENTITY, num_ranks=1, transport="loopback", layout=LAYOUT, slot_bytes=SLOT_BYTES
    )
    peers = PeerDirectory(greeting, channels)
    renewer = TicketRenewer(IDENTITY, channels, on_unknown)
    clock = asyncio.get_running_loop().time
    return Claims(peers, renewer, submit, block_size=BLOCK_SIZE, clock=clock), peers


def make_runs(
    nonces: NonceMemory,
    claims: Claims,
    peers: PeerDirectory,
    closer: TicketCloser,
    metrics: PrefillMetrics,
) -> LiveRuns:
    """The live calls of a worker of one rank."""
    return LiveRuns(
        IDENTITY,
        1,
        nonces=nonces,
        claims=claims,
        closer=closer,
        metrics=metrics,
        forget_peer=peers.forget,
    )


def make_service(
    runs: LiveRuns,
    nonces: NonceMemory,
    submit: Callable[[Command], None],
    num_tokens_left: Callable[[], int],
    drains: list[int],
    *,
    constraints: Constraints,
) -> PrefillService:
    """The service, which counts in ``drains`` how often it began to refuse."""
    return PrefillService(
        LIMITS,
        runs,
        nonces,
        submit,
        constraints=constraints,
        num_tokens_left=num_tokens_left,
        on_draining=lambda: drains.append(1),
    )


@contextlib.asynccontextmanager
async def service_bench(
    num_blocks: int = 33,
    max_num_batched_tokens: int = 64,
    *,
    num_nonces: int = 1000,
    compiler: FakeCompiler | None = None,
) -> AsyncIterator[ServiceBench]:
    """Serve, and stop everything at the end."""
    event_loop = asyncio.get_running_loop()
    compiler = compiler or FakeCompiler()
    channels = ChannelCache(partial(open_channel, credentials=CREDENTIALS))
    closer = TicketCloser(channels, retry_delays_s=(0.01,))
    registry = CollectorRegistry()
    metrics = PrefillMetrics(registry)
    nonces = NonceMemory(event_loop.time, capacity=num_nonces)

    def submit(command: Command) -> None:
        loop.submit(command)

    given_up: list[int] = []
    claims, peers = make_claims(channels, submit, given_up)
    runs = make_runs(nonces, claims, peers, closer, metrics)
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(pool, max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens)
    runner = FakeRunner()
    sender = FakeTicketSender(lambda closure: loop.submit(RankClosed(0, closure)))

    def emit(event: Event) -> None:
        event_loop.call_soon_threadsafe(runs.handle, event)

    settings = LoopSettings(max_model_len=64, push=PushSettings(num_layers=3), idle_s=0.01)
    loop = EngineLoop(scheduler, runner, SenderGroup(sender), emit, settings)
    metrics.watch(lambda: loop.load, lambda: closer.num_dropped)
    drains: list[int] = []
    constraints = Constraints("/nonexistent", 1000, open_compiler=lambda *_: compiler)
    num_waiting = partial(getattr, scheduler, "num_tokens_waiting")
    service = make_service(runs, nonces, submit, num_waiting, drains, constraints=constraints)
    ending = partial(_end, runs, claims, closer, channels)
    async with serve_decode(FakeDecode()) as decode, serve_prefill(service) as stub:
        loop.start()
        yield ServiceBench(
            stub=stub,
            decode=decode,
            claims=claims,
            service=service,
            runs=runs,
            nonces=nonces,
            runner=runner,
            sender=sender,
            scheduler=scheduler,
            loop=loop,
            registry=registry,
            drains=drains,
            given_up=given_up,
        )
        loop.submit(StopLoop())
        await ending()
        compiler.may_end.set()
        constraints.close()


async def _end(
    runs: LiveRuns, claims: Claims, closer: TicketCloser, channels: ChannelCache
) -> None:
    await runs.loop_ended
    await claims.close()
    await closer.flush()
    await channels.close()


@contextlib.asynccontextmanager
async def serve_prefill(service: PrefillService) -> AsyncIterator[prefill_pb2_grpc.PrefillStub]:
    """Serve on a free port; a stub for it."""
    server = create_server(CREDENTIALS)
    prefill_pb2_grpc.add_PrefillServicer_to_server(service, server)
    port = bind_port(server, LISTEN, CREDENTIALS)
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}", CREDENTIALS)
    try:
        yield prefill_pb2_grpc.PrefillStub(channel)
    finally:
        await channel.close(None)
        await server.stop(None)


def code_of(answer: object) -> str:
    assert isinstance(answer, common_pb2.Error), answer
    return common_pb2.ErrorCode.Name(answer.code).removeprefix("ERROR_CODE_")


def message_of(answer: object) -> str:
    assert isinstance(answer, common_pb2.Error), answer
    return answer.message


async def revoke(bench: ServiceBench, nonce: int) -> bool:
    response = await bench.stub.Revoke(
        prefill_pb2.RevokeRequest(
            request_id=f"request-{nonce}", nonce=nonce, prefill=IDENTITY, remember_s=30.0
        ),
        timeout=5,
    )
    return bool(response.drained)
