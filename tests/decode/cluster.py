"""A whole decode worker in the test's process, and the peers it talks to, without a model.

Real: gRPC with the secret, the loopback transport, senders, receiver, engine loop, pools. Not real:
the model. `ContextRunner` reads the context back from the KV pool and derives the next token from
what it finds there, so that KV in a wrong block, or of another request, gives other tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from decode.assembly import ModelSide
from decode.worker import DecodeDriver
from engine.memory.kv_pool import KVPool
from engine.parallel.groups import ProcessGroups
from engine.parallel.lockstep import SoloLockstep
from engine.request import Request, ScheduledRequest, num_blocks_for
from engine.runner import StepResult
from engine.sampling.inputs import SampledToken
from kv_transfer.layout import KVDtype, KVLayout
from kv_transfer.metadata import MetadataRecord, SlotLayout
from kv_transfer.sender import KVSender
from kv_transfer.ticket import PeerEndpoint, SendOutcome, SendReport, SendTicket
from kv_transfer.transport import KV_REGION, MemoryRegion, peer_name
from kv_transfer.transports import create_transport
from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
)
from runtime.net import Credentials, Listen
from runtime.pb import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)
from runtime.rpc import bind_port, create_server, open_channel
from runtime.sampling import SamplingParams
from runtime.wire import error_to_proto, identity, same_identity, sampling_to_proto
from runtime.worker import WorkerOptions
from worker.host import WorkerHost

SECRET = "a secret of tests"
CREDENTIALS = Credentials.of_secret(SECRET)
HOST = "127.0.0.1"
BLOCK_SIZE = 4
NUM_LAYERS = 2
LATENT_DIM = 3
VOCAB_SIZE = 1000
EPOCH = 77
LAYOUT = KVLayout(
    dtype=KVDtype.FLOAT32, block_size=BLOCK_SIZE, num_layers=NUM_LAYERS, latent_dim=LATENT_DIM
)


def make_pool(num_blocks: int) -> KVPool:
    return KVPool(num_blocks, NUM_LAYERS, BLOCK_SIZE, LATENT_DIM)


def next_token(context: Sequence[int]) -> int:
    """The token that the imagined model puts after `context`."""
    return (sum((index + 1) * token for index, token in enumerate(context)) % 900) + 50


def expected_output(prompt: Sequence[int], count: int) -> list[int]:
    """Greedy output of the imagined model."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def write_tokens(
    pool: KVPool, block_table: Sequence[int], start: int, tokens: Sequence[int]
) -> None:
    """The imagined KV: every element of a position is its token id."""
    for position, token in enumerate(tokens, start):
        block = block_table[position // BLOCK_SIZE]
        pool.data[block, :, position % BLOCK_SIZE] = float(token)


def imagine(pool: KVPool, block_table: Sequence[int], prompt: Sequence[int]) -> int:
    """The imagined model's prefill."""
    write_tokens(pool, block_table, 0, prompt)
    return next_token(prompt)


class ContextStep:
    """A step that the runner's stream comes to in its turn."""

    idle_s = None

    def __init__(self, requests: list[Request], tokens: Future[list[int | None]]) -> None:
        self.requests, self.tokens = requests, tokens

    def collect(self) -> list[StepResult]:
        return [
            StepResult(request=request, sampled=None if token is None else SampledToken(token))
            for request, token in zip(self.requests, self.tokens.result(30), strict=True)
        ]


class ContextRunner:
    """Runs steps on a KV pool without a model; can be slowed down, stopped and broken.

    Like a device it runs them on a stream of its own, in order and after they were launched, so
    that a block that is given away too early is written by two.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._stream = ThreadPoolExecutor(1, thread_name_prefix="device")
        self.go = threading.Event()
        self.go.set()
        self.step_s = 0.0
        self.error: Exception | None = None
        self.unusable: set[str] = set()
        """Ids of requests whose logits are not finite."""

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        after: ContextStep | None = None,
        least: int = 0,
    ) -> ContextStep:
        requests = [item.request for item in scheduled]
        rows = []
        for item in scheduled:
            known = item.request.token_ids(item.start, item.end)
            place = after.requests.index(item.request) if after and item.num_unread else -1
            rows.append((item, known, place, list(item.request.block_table)))
        unread = after.tokens if after is not None else None
        return ContextStep(requests, self._stream.submit(self._run_all, rows, unread))

    def run_dummy(self, *, least: int = 0) -> None:
        """Nothing to take part in."""

    def _run_all(
        self,
        rows: list[tuple[ScheduledRequest, list[int], int, list[int]]],
        unread: Future[list[int | None]] | None,
    ) -> list[int | None]:
        self.go.wait(20)
        threading.Event().wait(self.step_s)
        if self.error is not None:
            raise self.error
        tokens: list[int | None] = []
        for item, known, place, block_table in rows:
            if place >= 0:
                assert unread is not None
                known = [unread.result()[place] or 0]
            tokens.append(self._run(item, known, block_table))
        return tokens

    def _run(self, item: ScheduledRequest, known: list[int], block_table: list[int]) -> int | None:
        if item.request.request_id in self.unusable:
            return None
        write_tokens(self._pool, block_table, item.start, known)
        blocks = self._pool.data[block_table]
        positions = blocks.transpose(1, 2).reshape(-1, NUM_LAYERS * LATENT_DIM)[: item.end]
        assert torch.equal(positions, positions[:, :1].expand_as(positions)), "torn KV"
        return next_token([int(value) for value in positions[:, 0]])


class FakeRegistry(registry_pb2_grpc.RegistryServicer):
    """A router's registry that takes everybody."""

    def __init__(self) -> None:
        self.records: list[registry_pb2.WorkerRecord] = []
        self.was_draining = False

    async def Register(self, request: registry_pb2.RegisterRequest, context: Any) -> Any:
        self.records.append(request.worker)
        return registry_pb2.RegisterResponse(lease_id="lease", lease_ttl_s=0.3)

    async def Renew(self, request: registry_pb2.RenewRequest, context: Any) -> Any:
        self.was_draining |= request.draining
        return registry_pb2.RenewResponse(known=True)

    async def Deregister(self, request: registry_pb2.DeregisterRequest, context: Any) -> Any:
        return registry_pb2.DeregisterResponse()


@dataclass
class FakePrefill(prefill_pb2_grpc.PrefillServicer):
    """A prefill worker of `num_ranks` ranks, each with its own transport and sender."""

    num_ranks: int = 2
    instance: str = "prefill-0"
    epoch: int = 5
    stubs: dict[int, decode_pb2_grpc.DecodeStub] = field(default_factory=dict)
    """Of decode, by rank."""
    address: str = ""
    revoked: list[int] = field(default_factory=list)
    answers_revoke: bool = True
    layout: KVLayout = LAYOUT
    compute: Callable[[KVPool, Sequence[int], Sequence[int]], int] = imagine
    """Write a prompt's KV into blocks of a pool; return the first token."""
    reports: list[SendReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        layout = self.layout
        self._pool = KVPool(256, layout.num_layers, layout.block_size, layout.latent_dim)
        self._transports = [
            create_transport(
                "loopback", local_name=peer_name(self.instance, self.epoch, rank), host=HOST
            )
            for rank in range(self.num_ranks)
        ]
        region = MemoryRegion(KV_REGION, self._pool.address, self._pool.nbytes)
        self.senders = []
        for rank, transport in enumerate(self._transports):
            transport.register(region)
            self.senders.append(
                KVSender(
                    transport,
                    layout,
                    SlotLayout(),
                    kv_region=region,
                    on_closed=self._closed_by(rank),
                    part=rank,
                    num_parts=self.num_ranks,
                    num_threads=1,
                )
            )
        # Used in turn: those of requests in flight at once must differ.
        self._blocks = itertools.cycle(range(256))
        self._peers: dict[str, PeerEndpoint] = {}
        self._tickets: dict[int, decode_pb2.TransferTicket] = {}
        self.outcome = decode_pb2.TICKET_OUTCOME_SENT

    @property
    def identity(self) -> common_pb2.WorkerIdentity:
        return identity(self.instance, self.epoch, 0)

    async def handshake(self, decode: common_pb2.WorkerIdentity) -> decode_pb2.HandshakeResponse:
        request = decode_pb2.HandshakeRequest(
            prefill=self.identity,
            num_prefill_ranks=self.num_ranks,
            transport="loopback",
            layout_fingerprint=self.layout.fingerprint(),
            layout_description=self.layout.describe(),
            expected=decode,
        )
        response: decode_pb2.HandshakeResponse = await self.stubs[decode.rank].Handshake(request)
        if response.HasField("endpoint"):
            found = response.endpoint
            peer = peer_name(found.decode.instance, found.decode.epoch, found.decode.rank)
            self._peers[peer] = PeerEndpoint(
                peer=peer,
                endpoint=found.endpoint,
                kv_region_bytes=found.kv_region_bytes,
                metadata_region_bytes=found.metadata_region_bytes,
                fence_generation=found.fence_generation,
            )
        return response

    async def open(self, ticket: decode_pb2.TransferTicket) -> None:
        """Open the ticket on every rank; shake hands first where that was not done."""
        peer = peer_name(ticket.decode.instance, ticket.decode.epoch, ticket.decode.rank)
        if peer not in self._peers:
            await self.handshake(ticket.decode)
        self._tickets[ticket.nonce] = ticket
        for sender in self.senders:
            sender.open(
                SendTicket(
                    request_id=ticket.request_id,
                    nonce=ticket.nonce,
                    epoch=ticket.decode.epoch,
                    block_ids=tuple(ticket.block_ids),
                    slot=ticket.metadata_slot,
                    timeout_s=ticket.timeout_s,
                    fence_generation=ticket.fence_generation,
                ),
                self._peers[peer],
            )

    def push(self, ticket: decode_pb2.TransferTicket, prompt: Sequence[int]) -> int:
        """Compute the prompt and send all of its KV that decode lacks; returns the first token."""
        block_size = self.layout.block_size
        src = [next(self._blocks) for _ in range(num_blocks_for(len(prompt), block_size))]
        first_token = self.compute(self._pool, src, prompt)
        for sender in self.senders:
            sender.push(ticket.nonce, src[ticket.num_cached_tokens // block_size :], 0)
        return first_token

    def finish(self, ticket: decode_pb2.TransferTicket, first_token: int) -> None:
        """Send record and flags."""
        record = MetadataRecord(
            nonce=ticket.nonce, epoch=ticket.decode.epoch, first_token=first_token
        )
        for rank, sender in enumerate(self.senders):
            sender.finish(ticket.nonce, record if rank == 0 else None)

    async def run(self, ticket: decode_pb2.TransferTicket, prompt: Sequence[int]) -> int:
        """All of it; returns the first token."""
        await self.open(ticket)
        first_token = self.push(ticket, prompt)
        self.finish(ticket, first_token)
        return first_token

    def abandon(self, ticket: decode_pb2.TransferTicket, outcome: Any) -> None:
        """Stop on every rank, and close with `outcome`."""
        self.outcome = outcome
        for sender in self.senders:
            sender.abandon(ticket.nonce)

    async def Revoke(self, request: prefill_pb2.RevokeRequest, context: Any) -> Any:
        self.revoked.append(request.nonce)
        assert same_identity(request.prefill, self.identity)
        if not self.answers_revoke:
            await asyncio.sleep(3600)
        for sender in self.senders:
            sender.abandon(request.nonce)
        known = request.nonce in self._tickets
        while known and self._num_reports(request.nonce) < self.num_ranks:
            await asyncio.sleep(0.005)
        return prefill_pb2.RevokeResponse(drained=True)

    async def close_ticket(
        self, ticket: decode_pb2.TransferTicket, rank: int, outcome: Any, **more: Any
    ) -> decode_pb2.CloseTicketResponse:
        """The call that a rank makes when it is done."""
        response: decode_pb2.CloseTicketResponse = await self.stubs[ticket.decode.rank].CloseTicket(
            decode_pb2.CloseTicketRequest(
                request_id=ticket.request_id,
                nonce=ticket.nonce,
                decode_epoch=ticket.decode.epoch,
                prefill=identity(self.instance, self.epoch, rank),
                outcome=outcome,
                **more,
            )
        )
        return response

    def _num_reports(self, nonce: int) -> int:
        return sum(report.nonce == nonce for report in self.reports)

    def stop(self) -> None:
        for sender in self.senders:
            sender.close()
        for transport in self._transports:
            transport.close()

    def _closed_by(self, rank: int) -> Callable[[SendReport], None]:
        def closed(report: SendReport) -> None:
            self._loop.call_soon_threadsafe(self._report, rank, report)

        return closed

    def _report(self, rank: int, report: SendReport) -> None:
        self.reports.append(report)
        outcome = self.outcome
        if report.outcome is SendOutcome.FAILED:
            outcome = decode_pb2.TICKET_OUTCOME_FAILED
        error = None if report.error is None else error_to_proto(report.error)
        task = asyncio.ensure_future(
            self.close_ticket(
                self._tickets[report.nonce],
                rank,
                outcome,
                error=error,
                drained=report.drained,
                num_bytes=report.num_bytes,
            )
        )
        task.add_done_callback(lambda done: done.exception())


class FakeRouter:
    """One router process: its frames by request."""

    def __init__(self, stub: decode_pb2_grpc.DecodeStub, router_id: str = "router-0") -> None:
        self.stub = stub
        self.router_id = router_id
        self.deltas: dict[str, list[decode_pb2.TokenDelta]] = {}
        self.frames: list[decode_pb2.Frame] = []
        self._changed = asyncio.Condition()

    async def read(self) -> None:
        """Follow the frames until the stream ends."""
        async for frame in self.stub.Frames(decode_pb2.FramesRequest(router_id=self.router_id)):
            async with self._changed:
                self.frames.append(frame)
                for delta in frame.deltas:
                    self.deltas.setdefault(delta.request_id, []).append(delta)
                self._changed.notify_all()

    async def end_of(self, request_id: str, timeout_s: float = 10.0) -> list[decode_pb2.TokenDelta]:
        """All deltas of a request, once the last one is here."""

        def ended() -> bool:
            return any(delta.finish_reason for delta in self.deltas.get(request_id, []))

        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(ended)
        return self.deltas[request_id]

    async def tokens_of(self, request_id: str) -> list[int]:
        """Output tokens from index 1 on; checks that the indices have no gap."""
        tokens: list[int] = []
        for delta in await self.end_of(request_id):
            assert delta.start_index == 1 + len(tokens)
            tokens += delta.token_ids
        return tokens


@dataclass
class DecodeCluster:
    """A running decode worker, its peers, and how to make requests of it."""

    worker: WorkerHost
    driver: DecodeDriver
    runner: ContextRunner
    registry: FakeRegistry
    prefill: FakePrefill
    router: FakeRouter
    stub: decode_pb2_grpc.DecodeStub

    def request(self, request_id: str, prompt: Sequence[int], **sampling: Any) -> Any:
        """A ReserveRequest for greedy output."""
        params = replace(SamplingParams(temperature=0.0, max_tokens=8), **sampling)
        return decode_pb2.ReserveRequest(
            request_id=request_id,
            router_id=self.router.router_id,
            prompt_token_ids=prompt,
            sampling=sampling_to_proto(params),
            timeout_s=30.0,
            prefill=self.prefill.identity,
            prefill_address=self.prefill.address,
            num_prefill_ranks=self.prefill.num_ranks,
        )

    async def reserve(
        self, request_id: str, prompt: Sequence[int], **sampling: Any
    ) -> decode_pb2.TransferTicket:
        """The ticket, which must come without a rejection."""
        updates = [u async for u in self.stub.Reserve(self.request(request_id, prompt, **sampling))]
        assert updates[-1].WhichOneof("update") == "ticket", updates
        ticket: decode_pb2.TransferTicket = updates[-1].ticket
        return ticket

    async def load(self) -> decode_pb2.LoadReport:
        """As the worker's latest step left it."""
        await self.driver._bridge.num_live()
        await asyncio.sleep(0.002)
        return self.driver._load

    async def wait_empty(self, timeout_s: float = 10.0) -> None:
        """Until nothing is left; then the books must agree."""
        async with asyncio.timeout(timeout_s):
            while not await self.driver._bridge.is_empty():
                await asyncio.sleep(0.01)
        await self.driver._bridge.check_integrity()


class Overlap:
    """Whether workers of this process overlap their steps; a fixture sets it for whole files."""

    steps = "off"


def make_options(router: str, **settings: Any) -> WorkerOptions:
    transfer = {
        name: settings.pop(name)
        for name in ("transfer_timeout_s", "quarantine_timeout_s", "num_metadata_slots")
        if name in settings
    }
    decode = DecodeSection(
        **{
            "num_blocks": 33,
            "block_size": BLOCK_SIZE,
            "overlap_steps": Overlap.steps,
            **settings,
        }
    )
    config = ClusterConfig(
        model=ModelSection(path="/nowhere/imagined"),
        prefill=PrefillSection(block_size=BLOCK_SIZE),
        decode=decode,
        kv_transfer=KVTransferSection(transport="loopback", **transfer),
    )
    return WorkerOptions(
        role="decode",
        config=config,
        instance="decode-0",
        rank=0,
        rendezvous="",
        router=router,
        listen=Listen(bind=HOST),
        credentials=CREDENTIALS,
    )


@contextlib.asynccontextmanager
async def run_cluster(**settings: Any) -> AsyncIterator[DecodeCluster]:
    """Start everything; `settings` are fields of [decode] and [kv_transfer]."""
    registry = FakeRegistry()
    peers = create_server(CREDENTIALS)
    prefill = FakePrefill()
    registry_pb2_grpc.add_RegistryServicer_to_server(registry, peers)
    prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, peers)
    prefill.address = f"{HOST}:{bind_port(peers, Listen(bind=HOST), CREDENTIALS)}"
    await peers.start()
    options = make_options(prefill.address, **settings)
    pool = make_pool(options.config.decode.num_blocks)
    runner = ContextRunner(pool)
    side = ModelSide(
        close_steps=lambda: None,
        groups=ProcessGroups(),
        close_transfers=lambda: None,
        epoch=EPOCH,
        lockstep=SoloLockstep(),
        vocab_size=VOCAB_SIZE,
        max_model_len=100,
        kv_pool=pool,
        runner=runner,
    )
    driver = DecodeDriver(options, lambda _: side)
    worker = WorkerHost(options, driver)
    await worker.startup()
    channel = open_channel(registry.records[0].address, CREDENTIALS)
    stub = decode_pb2_grpc.DecodeStub(channel)
    prefill.stubs[0] = stub
    router = FakeRouter(stub)
    reading = asyncio.ensure_future(router.read())
    main = asyncio.ensure_future(worker.main_loop())
    try:
        yield DecodeCluster(worker, driver, runner, registry, prefill, router, stub)
    finally:
        main.cancel()
        runner.go.set()
        await asyncio.to_thread(prefill.stop)
        await worker.shutdown()
        reading.cancel()
        await asyncio.gather(main, reading, return_exceptions=True)
        await channel.close(None)
        await peers.stop(None)
