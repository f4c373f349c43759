"""A prefill worker and a decode rank that follow the contracts and compute nothing.

They join the real registry over gRPC, hand out reservations and tickets, answer first tokens and
stream frames; what a request's output is (`tests.router.outputs`), and what goes wrong, is set by
the test. They meet each other only through the reservation's nonce, as real workers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
from google.protobuf.message import Message

from runtime.errors import (
    OutOfBlocksError,
    StaleTicketError,
    TandemError,
)
from runtime.net.credentials import Credentials, Listen
from runtime.pb import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    registry_pb2,
)
from runtime.rpc.call_server import CallServer, CarriedMethod
from runtime.rpc.grpc_calls import bind_port, create_server, map_rpc_errors, open_channel
from runtime.rpc.registration import RegistryClient
from runtime.rpc.wire import (
    error_from_proto,
    error_to_proto,
    own_wire,
    sampling_from_proto,
)
from runtime.sampling import SamplingParams
from runtime.trace.context import trace_id
from tests.router.deltas import (
    delta_of,
    error_delta,
    frame_of,
    joined,
    position_logprobs,
    since,
)
from tests.router.outputs import MAX_MODEL_LEN, Choose, Script, Tokens
from tests.tcp_proxy import Proxy

HEARTBEAT_S = 1.0
"""As decode ranks have it."""

SECRET = "test-secret"
CREDENTIALS = Credentials.of_secret(SECRET)
LAYOUT = "layout-1"


@dataclass
class FakeWorker:
    """What both roles share: a server, an identity, a lease, a rule for tokens."""

    instance: str
    model: str
    script: Script
    epoch: int = field(default_factory=lambda: secrets.randbits(60) + 1)
    address: str = ""
    host: str = "127.0.0.1"
    report: Callable[[], registry_pb2.WorkerLoad] | None = None
    """Its load at each renewal; None: an empty one."""
    layout: str = LAYOUT
    max_num_requests: int = 0
    """As told to the registry; nothing bounds them here."""
    choose: Choose | None = None
    """Instead of the script."""
    add_experts: Callable[[grpc.aio.Server], None] | None = None  # serves what tells of them
    traces: list[tuple[str, str]] = field(default_factory=list)
    """Calls, and the id of the trace that each came with."""
    server: grpc.aio.Server | None = None
    calls: CallServer | None = None
    calls_address: str = ""
    registration: RegistryClient | None = None

    @property
    def identity(self) -> common_pb2.WorkerIdentity:
        return common_pb2.WorkerIdentity(instance=self.instance, epoch=self.epoch)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def tokens(self, context: Sequence[int], num_output: int, sampling: SamplingParams) -> Tokens:
        return Tokens(self, list(context), num_output, sampling)

    async def join(self, control: str, role: common_pb2.Role) -> None:
        record = registry_pb2.WorkerRecord(
            identity=self.identity,
            role=role,
            address=self.address,
            calls_address=self.calls_address,
            num_ranks=1,
            model=self.model,
            max_model_len=MAX_MODEL_LEN,
            layout_fingerprint=self.layout,
            transport="loopback",
            block_size=64,
            max_num_requests=self.max_num_requests,
            has_experts=self.add_experts is not None,
        )
        self.registration = RegistryClient(control, CREDENTIALS, record, self.load)
        await self.registration.start()

    def make_server(self) -> grpc.aio.Server:
        """What both roles serve alike."""
        server = create_server(CREDENTIALS)
        if self.add_experts is not None:
            self.add_experts(server)
        return server

    def carry(
        self, name: str, request: type[Message], handler: Callable[..., Awaitable[Message]]
    ) -> int:
        """Serve a method as a short call, at a port of its own, which is returned."""
        self.calls = CallServer(CREDENTIALS)
        service = request.DESCRIPTOR.file.name.rpartition("/")[2].removesuffix(".proto").title()
        self.calls.carry(service, **{name: CarriedMethod(request.FromString, handler)})
        return self.calls.start(Listen(bind=self.host))

    def load(self) -> registry_pb2.WorkerLoad:
        if self.report is not None:
            return self.report()
        return registry_pb2.WorkerLoad(num_free_blocks=10, num_total_blocks=10)

    async def die(self) -> None:
        """End without a word to the registry, as a killed process does."""
        self.fall_silent()
        await self._stop()

    def fall_silent(self) -> None:
        """Renew no lease any more, and serve on."""
        if self.registration is not None:
            for lease in self.registration._leases:
                if lease._task is not None:
                    lease._task.cancel()

    def set_draining(self) -> None:
        assert self.registration is not None
        self.registration.set_draining()

    async def close(self) -> None:
        if self.registration is not None:
            await self.registration.close()
            self.registration = None
        await self._stop()

    async def _stop(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            await server.stop(None)
        if self.calls is not None:
            calls, self.calls = self.calls, None
            await calls.stop(0.0)


@dataclass
class Reserved:
    """One request at the fake decode rank."""

    request: decode_pb2.ReserveRequest
    nonce: int
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    has_ticket: bool = False
    task: asyncio.Task[None] | None = None
    sent: list[decode_pb2.TokenDelta] = field(default_factory=list)
    """All news of it, for a stream that comes after one that broke."""


async def next_frame(
    decode: FakeDecode, frames: asyncio.Queue[decode_pb2.Frame | None]
) -> decode_pb2.Frame | None:
    """What comes, or a sign of life where nothing does."""
    try:
        frame = await asyncio.wait_for(frames.get(), HEARTBEAT_S)
    except TimeoutError:
        frame = decode_pb2.Frame(decode=decode.identity)
    while decode.is_silent:
        await asyncio.sleep(0.01)
    return frame


@dataclass
class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServicer):
    """A decode rank; tokens flow as soon as prefill closed the ticket."""

    step_s: float = 0.001
    reserve_error: TandemError | None = None
    reserve_s: float = 0.0
    """How long Reserve takes."""
    claim_error: TandemError | None = None
    claim_s: float = 0.0
    """How long a claim waits for blocks."""
    blocks: asyncio.Event | None = None  # a claim waits until it is set, too
    fail_after: int = 0
    """Send an error instead of this output token; 0: never."""
    fail_error: TandemError = field(
        default_factory=lambda: OutOfBlocksError("the KV pool is full and nothing can be preempted")
    )
    fails_always: bool = False
    """The same, whichever token would be the first that is sent here."""
    die_after: int = 0
    """Die instead of sending this output token; 0: never."""
    cut_after: int = 0
    """Break the stream once where this output token would be sent, which is lost; 0: never."""
    hold_after: int = 0
    """Send nothing from this output token on until ``go_on``; 0: never."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    skip_token: int = 0
    """Leave this output token out; 0: none."""
    finish_reason: int = 0
    """Send this in every delta, instead of the right one."""
    loses_finish: bool = False
    """Send the last token without its finish reason, then fail."""
    repeat_tokens: bool = False
    sends_rows: bool = True  # else as a worker of an earlier version: deltas alone
    num_drafts: int = 0  # that a step verifies, and all are right
    burst: bool = False  # send all deltas of a request in one frame
    refuses_streams: bool = False
    hangs_streams: bool = False  # new streams never stand
    is_silent: bool = False  # streams that stand bring nothing, not even a sign of life
    proxy: Proxy | None = None
    """Between router and worker."""
    abort_failures: int = 0
    """So many calls of Abort fail."""
    requests: dict[str, Reserved] = field(default_factory=dict)
    finished: dict[str, Reserved] = field(default_factory=dict)
    """Their news is kept for a stream that broke."""
    seen: list[decode_pb2.ReserveRequest] = field(default_factory=list)
    resumed: list[decode_pb2.ResumePoint] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """That were to be ended if they had no ticket, and have one."""
    num_streams: int = 0
    num_streams_ever: int = 0
    _streams: dict[str, asyncio.Queue[decode_pb2.Frame | None]] = field(default_factory=dict)
    _dying: asyncio.Task[None] | None = None

    async def start(self, control: str, port: int = 0) -> None:
        listen = Listen(bind=self.host, port=port)
        self.server = self.make_server()
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self.server)
        port = bind_port(self.server, listen, CREDENTIALS)
        await self.server.start()
        calls_port = self.carry("Reserve", decode_pb2.ReserveRequest, self.Reserve)
        if self.proxy is not None:
            port, calls_port = await self.proxy.start(port), await self.proxy.start(calls_port)
        self.address = f"{self.host}:{port}"
        self.calls_address = f"{self.host}:{calls_port}"
        await self.join(control, common_pb2.ROLE_DECODE)

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: object
    ) -> decode_pb2.ReserveResponse:
        self.traces.append(("Reserve", trace_id()))
        self.seen.append(request)
        await asyncio.sleep(self.reserve_s)
        if self.reserve_error is not None:
            error = error_to_proto(self.reserve_error, request.request_id)
            return decode_pb2.ReserveResponse(error=error)
        reserved = Reserved(request, secrets.randbits(63) + 1)
        self.requests[request.request_id] = reserved
        reserved.task = asyncio.create_task(self._decode(reserved))
        reservation = decode_pb2.Reservation(
            request_id=request.request_id,
            decode=self.identity,
            decode_address=self.address,
            nonce=reserved.nonce,
        )
        return decode_pb2.ReserveResponse(reservation=reservation)

    async def Claim(
        self, request: decode_pb2.ClaimRequest, context: object
    ) -> decode_pb2.ClaimResponse:
        error = self.claim_error
        reserved = self.requests.get(request.request_id)
        if reserved is None or reserved.nonce != request.nonce:
            error = StaleTicketError("nothing waits for this claim")
        if error is not None:
            return decode_pb2.ClaimResponse(error=error_to_proto(error, request.request_id))
        await asyncio.sleep(self.claim_s)
        if self.blocks is not None:
            await self.blocks.wait()
        reserved.has_ticket = True
        ticket = decode_pb2.TransferTicket(
            request_id=request.request_id,
            decode=self.identity,
            nonce=request.nonce,
            block_ids=[1],
            timeout_s=30,
        )
        return decode_pb2.ClaimResponse(ticket=ticket)

    async def CloseTickets(
        self, request: decode_pb2.CloseTicketsRequest, context: object
    ) -> decode_pb2.CloseTicketsResponse:
        response = decode_pb2.CloseTicketsResponse()
        for closure in request.closures:
            reserved = self.requests.get(closure.request_id)
            if reserved is None or reserved.nonce != closure.nonce:
                response.unknown.append(closure.nonce)
                continue
            part = closure.parts[0]
            if part.outcome == decode_pb2.TICKET_OUTCOME_SENT:
                reserved.arrived.set()
                continue
            if part.outcome == decode_pb2.TICKET_OUTCOME_FAILED:
                self._say(reserved, [error_delta(closure.request_id, part.error)])
            self._free(closure.request_id)
        return response

    async def Abort(
        self, request: decode_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.AbortResponse:
        self.traces.append(("Abort", trace_id()))
        if self.abort_failures:
            self.abort_failures -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the abort is lost")
        if request.only_without_ticket and self.requests[request.request_id].has_ticket:
            self.kept.append(request.request_id)
            return decode_pb2.AbortResponse(known=False)
        self.aborted.append(request.request_id)
        self.finished.pop(request.request_id, None)
        return decode_pb2.AbortResponse(known=self._free(request.request_id))

    async def Frames(
        self, request: decode_pb2.FramesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.Frame]:
        self.traces.append(("Frames", trace_id()))
        if self.hangs_streams:
            await asyncio.Event().wait()
        if self.refuses_streams:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no streams")
        frames: asyncio.Queue[decode_pb2.Frame | None] = asyncio.Queue()
        self._streams[request.router_id] = frames
        self.num_streams += 1
        self.num_streams_ever += 1
        try:
            yield decode_pb2.Frame(decode=self.identity)
            for point in request.resume:
                self.resumed.append(point)
                yield frame_of(self, self._news_since(point))
            while True:
                frame = await next_frame(self, frames)
                if frame is None:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream was cut")
                assert frame is not None
                yield frame
        finally:
            self.num_streams -= 1
            if self._streams.get(request.router_id) is frames:
                del self._streams[request.router_id]

    def cut_streams(self) -> None:
        """Break all streams; what they have not sent yet is lost with them."""
        for router_id in list(self._streams):
            frames = self._streams.pop(router_id)
            while not frames.empty():
                frames.get_nowait()
            frames.put_nowait(None)

    def send(self, router_id: str, deltas: Iterable[decode_pb2.TokenDelta]) -> None:
        """One frame, where somebody reads."""
        load = registry_pb2.WorkerLoad(num_requests_running=len(self.requests), num_total_blocks=10)
        if router_id in self._streams:
            self._streams[router_id].put_nowait(frame_of(self, deltas, load))

    def fail(self, error: TandemError) -> str:
        """End the only request so; returns its id."""
        (request_id,) = self.requests
        self._give_back(error)
        return request_id

    def drain(self, error: TandemError) -> None:
        """Take nothing new and give all requests back."""
        self.reserve_error = self.claim_error = error
        self._give_back(error)

    def _give_back(self, error: TandemError) -> None:
        for request_id, reserved in list(self.requests.items()):
            self._say(reserved, [error_delta(request_id, error_to_proto(error, request_id))])
            self._free(request_id)

    def _say(self, reserved: Reserved, deltas: list[decode_pb2.TokenDelta]) -> None:
        reserved.sent += deltas
        self.send(reserved.request.router_id, deltas)

    def _news_since(self, point: decode_pb2.ResumePoint) -> list[decode_pb2.TokenDelta]:
        reserved = self.requests.get(point.request_id) or self.finished.get(point.request_id)
        if reserved is None:
            error = error_to_proto(StaleTicketError("the request is not known"), point.request_id)
            return [error_delta(point.request_id, error)]
        return since(reserved.sent, point.next_index)

    async def _decode(self, reserved: Reserved) -> None:
        request = reserved.request
        await reserved.arrived.wait()
        params = sampling_from_proto(request.sampling)
        num_output = request.num_output_tokens
        tokens = self.tokens(request.context_token_ids, num_output, params)
        deltas = []
        for index in range(num_output + 1, params.max_tokens):
            await asyncio.sleep(0 if self.burst else self.step_s)
            if index == self.hold_after:
                await self.go_on.wait()
            if index == self.die_after:
                self._dying = asyncio.create_task(self.die())
                return
            if index == self.skip_token:
                continue
            deltas.append(delta_of(self, request, tokens, index))
            finished = bool(deltas[-1].finish_reason)
            if index == self.cut_after:
                self.cut_after = 0
                reserved.sent += deltas
                deltas = []
                self.cut_streams()
            elif finished or not (self.burst or index % (1 + self.num_drafts)):
                self._say(reserved, joined(deltas, self.num_drafts))
                deltas = []
            if finished:
                break
        if self.loses_finish:
            error = error_to_proto(self.fail_error)
            self._say(reserved, [error_delta(request.request_id, error)])
        self.finished[request.request_id] = reserved
        self.requests.pop(request.request_id, None)

    def _free(self, request_id: str) -> bool:
        reserved = self.requests.pop(request_id, None)
        if reserved is not None and reserved.task is not None:
            reserved.task.cancel()
        return reserved is not None


@dataclass
class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServicer):
    """A prefill worker; claims, answers the first token, then tells decode that the KV is there."""

    run_s: float = 0.0
    run_error: TandemError | None = None
    seen: list[prefill_pb2.RunRequest] = field(default_factory=list)
    num_computed: int = 0
    """Of those seen, what decode gave a ticket for."""
    cancelled: list[str] = field(default_factory=list)
    close_first: bool = False
    """Let decode begin before the first token is answered."""
    transfer_error: TandemError | None = None
    """Fail transfers so, after the first token."""
    num_failing: int = 1 << 30
    """How many fail before one succeeds."""
    num_transfers: int = 0
    holds_transfers: bool = False
    """Never end one."""
    holds_runs: bool = False
    """Answer none until ``go_on``."""
    mask_cpu_s: float = 0.0
    """What each first token's mask has cost."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    _pushes: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, control: str, port: int = 0) -> None:
        listen = Listen(bind=self.host, port=port)
        self.server = self.make_server()
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, self.server)
        self.address = listen.address(bind_port(self.server, listen, CREDENTIALS))
        await self.server.start()
        calls_port = self.carry("Run", prefill_pb2.RunRequest, self.Run)
        self.calls_address = listen.address(calls_port)
        await self.join(control, common_pb2.ROLE_PREFILL)

    async def Run(
        self, request: prefill_pb2.RunRequest, context: object
    ) -> prefill_pb2.RunResponse:
        self.traces.append(("Run", trace_id()))
        self.seen.append(request)
        reservation = request.reservation
        try:
            if self.run_error is not None:
                error = error_to_proto(self.run_error, request.request_id)
                return prefill_pb2.RunResponse(error=error)
            await self._claim(reservation)
            self.num_computed += 1
            if self.close_first:
                await self._push(reservation, done=False)
            await asyncio.sleep(self.run_s)
            if self.holds_runs:
                await self.go_on.wait()
            first = self._first(request)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        except TandemError as error:
            return prefill_pb2.RunResponse(error=error_to_proto(error, request.request_id))
        push = asyncio.create_task(self._push(reservation, done=bool(first.finish_reason)))
        self._pushes.add(push)
        push.add_done_callback(self._pushes.discard)
        return prefill_pb2.RunResponse(first_token=first)

    def _first(self, request: prefill_pb2.RunRequest) -> prefill_pb2.FirstToken:
        params = sampling_from_proto(request.sampling)
        context, index = request.context_token_ids, request.num_output_tokens
        tokens = self.tokens(context, index, params)
        first = prefill_pb2.FirstToken(
            index=index,
            token_id=tokens.at(index),
            finish_reason=tokens.finish_at(index),
            num_cached_tokens=len(context) // 2,
            timings=common_pb2.Timings(
                prefill_queue_s=0.001, prefill_compute_s=0.003, mask_cpu_s=self.mask_cpu_s
            ),
        )
        if params.num_logprobs >= 0:
            first.logprobs.CopyFrom(position_logprobs(tokens.at(index), params.num_logprobs))
        if params.num_prompt_logprobs >= 0:
            for token in context[1:]:
                position = position_logprobs(token, params.num_prompt_logprobs)
                position.rank = 1
                first.prompt_logprobs.append(position)
        return first

    async def _claim(self, reservation: decode_pb2.Reservation) -> None:
        request = decode_pb2.ClaimRequest(
            request_id=reservation.request_id,
            nonce=reservation.nonce,
            decode=reservation.decode,
            prefill=self.identity,
            num_prefill_ranks=1,
            layout_fingerprint=self.layout,
            wire=own_wire(),
        )
        with map_rpc_errors(f"decode {reservation.decode.instance}"):
            async with open_channel(reservation.decode_address, CREDENTIALS) as channel:
                response = await decode_pb2_grpc.DecodeStub(channel).Claim(request)
        if response.HasField("error"):
            decode = reservation.decode
            name = f"{decode.instance}/{decode.rank}"
            raise error_from_proto(response.error, relayed_from=name)

    async def _push(self, reservation: decode_pb2.Reservation, *, done: bool) -> None:
        outcome = decode_pb2.TICKET_OUTCOME_NOT_NEEDED if done else decode_pb2.TICKET_OUTCOME_SENT
        self.num_transfers += 1
        if self.holds_transfers:
            await asyncio.Event().wait()
        error = None
        if self.transfer_error is not None and self.num_transfers <= self.num_failing:
            await asyncio.sleep(0.02)  # the first token is out
            outcome = decode_pb2.TICKET_OUTCOME_FAILED
            error = error_to_proto(self.transfer_error)
        part = decode_pb2.PartClosure(outcome=outcome, error=error, drained=True)
        closure = decode_pb2.TicketClosure(
            request_id=reservation.request_id, nonce=reservation.nonce, parts=[part]
        )
        request = decode_pb2.CloseTicketsRequest(
            prefill=self.identity, decode_epoch=reservation.decode.epoch, closures=[closure]
        )
        with contextlib.suppress(TandemError), map_rpc_errors("decode"):
            async with open_channel(reservation.decode_address, CREDENTIALS) as channel:
                await decode_pb2_grpc.DecodeStub(channel).CloseTickets(request)
