"""A whole decode worker in the test's process, and the peers it talks to, without a model.

Real: gRPC with the secret, the loopback transport, senders, receiver, engine loop, pools. Not real:
the model, which is that of `imagined`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio

from decode.assembly import ModelSide
from decode.worker import DecodeDriver
from engine.attention.kv_spec import KVSpec
from engine.memory.kv_pool import KVPool
from engine.parallel.groups import ProcessGroups
from engine.parallel.lockstep import SoloLockstep
from engine.request import num_blocks_for
from engine.streams import Streams
from kv_transfer.layout import KVLayout
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
from runtime.net.credentials import Credentials, Listen
from runtime.pb import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)
from runtime.rpc.grpc_calls import bind_port, create_server, open_channel
from runtime.rpc.wire import (
    error_to_proto,
    identity,
    own_wire,
    same_identity,
    sampling_to_proto,
)
from runtime.sampling import SamplingParams
from tests.decode.imagined import (
    BLOCK_SIZE,
    LAYOUT,
    VOCAB_SIZE,
    ContextRunner,
    imagine,
    make_pool,
)
from worker.arguments import WorkerOptions
from worker.host import WorkerHost
from worker.lifecycle import DecodeStatus

SECRET = "a secret of tests"
CREDENTIALS = Credentials.of_secret(SECRET)
HOST = "127.0.0.1"
EPOCH = 77
ClaimCall = grpc.aio.UnaryUnaryCall[decode_pb2.ClaimRequest, decode_pb2.ClaimResponse]


class FakeRegistry(registry_pb2_grpc.RegistryServicer):
    """A router's registry that takes everybody."""

    def __init__(self) -> None:
        self.records: list[registry_pb2.WorkerRecord] = []
        self.was_draining = False

    async def Register(self, request: registry_pb2.RegisterRequest, context: Any) -> Any:
        self.records.append(request.worker)
        return registry_pb2.RegisterResponse(lease_id="lease", lease_ttl_s=6.0, wire=own_wire())

    async def Renew(self, request: registry_pb2.RenewRequest, context: Any) -> Any:
        self.was_draining |= request.draining
        return registry_pb2.RenewResponse(known=True)

    async def Deregister(self, request: registry_pb2.DeregisterRequest, context: Any) -> Any:
        return registry_pb2.DeregisterResponse()


@dataclass
class FakePrefill(prefill_pb2_grpc.PrefillServicer):
    """A prefill worker of `num_ranks` ranks, each with its own transport and sender.

    A context is the prompt, or the prompt and the output so far.
    """

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
        self._pool = KVPool(
            256, layout.num_layers, layout.block_size, KVSpec.shared(layout.head_width)
        )
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

    def claim(self, reservation: decode_pb2.Reservation) -> ClaimCall:
        """Ask for the ticket; a call that waits as long as decode has no blocks."""
        decode = reservation.decode
        peer = self._peers.get(peer_name(decode.instance, decode.epoch, decode.rank))
        request = decode_pb2.ClaimRequest(
            request_id=reservation.request_id,
            nonce=reservation.nonce,
            decode=decode,
            prefill=self.identity,
            num_prefill_ranks=self.num_ranks,
            transport="loopback",
            layout_fingerprint=self.layout.fingerprint(),
            layout_description=self.layout.describe(),
            metadata_slot_bytes=SlotLayout().slot_bytes,
            has_endpoint=peer is not None,
            fence_generation=0 if peer is None else peer.fence_generation,
            wire=own_wire(),
        )
        call: ClaimCall = self.stubs[decode.rank].Claim(request)
        return call

    async def ticket(self, call: ClaimCall) -> decode_pb2.TransferTicket:
        """The ticket that a claim is answered with, and the endpoint where there is one."""
        response = await call
        assert response.WhichOneof("result") == "ticket", response
        if response.HasField("endpoint"):
            self._meet(response.endpoint)
        return response.ticket

    def _meet(self, found: decode_pb2.PeerEndpoint) -> None:
        peer = peer_name(found.decode.instance, found.decode.epoch, found.decode.rank)
        self._peers[peer] = PeerEndpoint(
            peer=peer,
            endpoint=found.endpoint,
            kv_region_bytes=found.kv_region_bytes,
            metadata_region_bytes=found.metadata_region_bytes,
            fence_generation=found.fence_generation,
        )

    def open(self, ticket: decode_pb2.TransferTicket) -> None:
        """Open the ticket on every rank."""
        peer = peer_name(ticket.decode.instance, ticket.decode.epoch, ticket.decode.rank)
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

    def push(self, ticket: decode_pb2.TransferTicket, context: Sequence[int]) -> int:
        """Compute the context and send all of its KV that decode lacks; returns the next token."""
        block_size = self.layout.block_size
        src = [next(self._blocks) for _ in range(num_blocks_for(len(context), block_size))]
        first_token = self.compute(self._pool, src, context)
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

    def run(self, ticket: decode_pb2.TransferTicket, context: Sequence[int]) -> int:
        """All of it; returns the next token."""
        self.open(ticket)
        first_token = self.push(ticket, context)
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
    ) -> decode_pb2.CloseTicketsResponse:
        """Say that a rank is done."""
        part = decode_pb2.PartClosure(rank=rank, outcome=outcome, **more)
        closure = decode_pb2.TicketClosure(
            request_id=ticket.request_id, nonce=ticket.nonce, parts=[part]
        )
        request = decode_pb2.CloseTicketsRequest(
            prefill=self.identity, decode_epoch=ticket.decode.epoch, closures=[closure]
        )
        stub = self.stubs[ticket.decode.rank]
        response: decode_pb2.CloseTicketsResponse = await stub.CloseTickets(request)
        return response

    async def renew(
        self, decode: common_pb2.WorkerIdentity, *nonces: int
    ) -> decode_pb2.RenewTicketsResponse:
        """Say that these prompts are still being computed."""
        request = decode_pb2.RenewTicketsRequest(
            prefill=self.identity, decode_epoch=decode.epoch, nonces=nonces
        )
        stub = self.stubs[decode.rank]
        response: decode_pb2.RenewTicketsResponse = await stub.RenewTickets(request)
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
    """One router process: its frames by request, whose context ends in `first[...]` output."""

    def __init__(self, stub: decode_pb2_grpc.DecodeStub, router_id: str = "router-0") -> None:
        self.stub = stub
        self.router_id = router_id
        self.deltas: dict[str, list[decode_pb2.TokenDelta]] = {}
        self.first: dict[str, int] = {}
        self.frames: list[decode_pb2.Frame] = []
        self.reading: asyncio.Future[None] | None = None
        self._changed = asyncio.Condition()

    async def read(self, *resume: decode_pb2.ResumePoint) -> None:
        """Follow the frames until the stream ends."""
        request = decode_pb2.FramesRequest(router_id=self.router_id, resume=resume)
        async for frame in self.stub.Frames(request):
            async with self._changed:
                self.frames.append(frame)
                for delta in frame.deltas:
                    self.deltas.setdefault(delta.request_id, []).append(delta)
                self._changed.notify_all()

    async def end_of(self, request_id: str, timeout_s: float = 60.0) -> list[decode_pb2.TokenDelta]:
        """All deltas of a request, once the last one is here."""

        def ended() -> bool:
            return any(delta.finish_reason for delta in self.deltas.get(request_id, []))

        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(ended)
        return self.deltas[request_id]

    async def tokens_of(self, request_id: str) -> list[int]:
        """Output tokens after prefill's; checks that the indices have no gap."""
        tokens: list[int] = []
        first = self.first.get(request_id, 0) + 1
        for delta in await self.end_of(request_id):
            assert delta.start_index == first + len(tokens)
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

    def request(
        self, request_id: str, context: Sequence[int], num_output: int = 0, **sampling: Any
    ) -> decode_pb2.ReserveRequest:
        """A ReserveRequest for greedy output."""
        params = replace(SamplingParams(temperature=0.0, max_tokens=8), **sampling)
        self.router.first[request_id] = num_output
        return decode_pb2.ReserveRequest(
            request_id=request_id,
            router_id=self.router.router_id,
            context_token_ids=context,
            num_output_tokens=num_output,
            sampling=sampling_to_proto(params),
            timeout_s=30.0,
            prefill=self.prefill.identity,
            prefill_address=self.prefill.address,
            num_prefill_ranks=self.prefill.num_ranks,
        )

    async def place(self, request: decode_pb2.ReserveRequest) -> decode_pb2.Reservation:
        """A reservation, which must not be refused."""
        response: decode_pb2.ReserveResponse = await self.stub.Reserve(request)
        assert response.WhichOneof("result") == "reservation", response
        return response.reservation

    async def refusal(self, request: decode_pb2.ReserveRequest) -> common_pb2.Error:
        """Why there is none."""
        response: decode_pb2.ReserveResponse = await self.stub.Reserve(request)
        assert response.WhichOneof("result") == "error", response
        return response.error

    async def claim(self, request_id: str, context: Sequence[int], **sampling: Any) -> ClaimCall:
        """Reserve; the claim may wait for blocks."""
        return self.prefill.claim(await self.place(self.request(request_id, context, **sampling)))

    async def reserve(
        self, request_id: str, context: Sequence[int], num_output: int = 0, **sampling: Any
    ) -> decode_pb2.TransferTicket:
        """The ticket, which must come without a rejection."""
        request = self.request(request_id, context, num_output, **sampling)
        return await self.prefill.ticket(self.prefill.claim(await self.place(request)))

    async def counts(self) -> dict[str, float]:
        """Live requests by status."""
        await self.load()
        families = [f for f in self.worker.registry.collect() if f.name == "pd_decode_num_requests"]
        return {sample.labels["status"]: sample.value for f in families for sample in f.samples}

    async def wait_for(self, status: DecodeStatus, count: int = 1) -> None:
        """Until so many requests are in the state."""
        async with asyncio.timeout(60):
            while (await self.counts()).get(status.value) != count:
                await asyncio.sleep(0.005)

    async def load(self) -> registry_pb2.WorkerLoad:
        """As the worker's latest step left it."""
        await self.driver._bridge.num_live()
        await asyncio.sleep(0.002)
        return self.driver._load

    async def wait_empty(self, timeout_s: float = 60.0) -> None:
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
    pool = make_pool(options.config.decode.sizes.num_blocks)
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
        streams=Streams(pool.device),
    )
    driver = DecodeDriver(options, lambda _: side)
    worker = WorkerHost(options, driver)
    await worker.startup()
    channel = open_channel(registry.records[0].address, CREDENTIALS)
    stub = decode_pb2_grpc.DecodeStub(channel)
    prefill.stubs[0] = stub
    router = FakeRouter(stub)
    router.reading = asyncio.ensure_future(router.read())
    main = asyncio.ensure_future(worker.main_loop())
    try:
        yield DecodeCluster(worker, driver, runner, registry, prefill, router, stub)
    finally:
        main.cancel()
        runner.go.set()
        await asyncio.to_thread(prefill.stop)
        await worker.shutdown()
        router.reading.cancel()
        await asyncio.gather(main, router.reading, return_exceptions=True)
        await channel.close(None)
        await peers.stop(None)
