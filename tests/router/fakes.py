"""A prefill worker and a decode rank that follow the contracts and compute nothing.

They join the real registry over gRPC, hand out tickets, answer first tokens and stream frames;
what a request's output is, and what goes wrong, is set by the test. They meet each other only
through the ticket's nonce, as real workers do.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from runtime.errors import OutOfBlocksError, TandemError
from runtime.net import Credentials, Listen
from runtime.pb import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    registry_pb2,
)
from runtime.registration import RegistryClient
from runtime.rpc import bind_port, create_server, open_channel
from runtime.sampling import finish_reason_after
from runtime.wire import (
    error_to_proto,
    finish_reason_to_proto,
    sampling_from_proto,
)

SECRET = "test-secret"
CREDENTIALS = Credentials.of_secret(SECRET)
LAYOUT = "layout-1"
MAX_MODEL_LEN = 256

Script = Callable[[Sequence[int]], list[int]]
"""The output tokens for a prompt, endless enough or ending in a stop token."""


@dataclass
class FakeWorker:
    """What both roles share: a server, an identity, a lease."""

    instance: str
    model: str
    script: Script
    epoch: int = field(default_factory=lambda: secrets.randbits(60) + 1)
    address: str = ""
    layout: str = LAYOUT
    server: grpc.aio.Server | None = None
    registration: RegistryClient | None = None

    @property
    def identity(self) -> common_pb2.WorkerIdentity:
        return common_pb2.WorkerIdentity(instance=self.instance, epoch=self.epoch)

    async def join(self, control: str, role: common_pb2.Role) -> None:
        record = registry_pb2.WorkerRecord(
            identity=self.identity,
            role=role,
            address=self.address,
            num_ranks=1,
            model=self.model,
            max_model_len=MAX_MODEL_LEN,
            layout_fingerprint=self.layout,
            transport="loopback",
            block_size=64,
        )
        self.registration = RegistryClient(control, CREDENTIALS, record, self.load)
        await self.registration.start()

    def load(self) -> registry_pb2.WorkerLoad:
        return registry_pb2.WorkerLoad(num_free_blocks=10, num_total_blocks=10)

    async def die(self) -> None:
        """End without a word to the registry, as a killed process does."""
        if self.server is not None:
            server, self.server = self.server, None
            await server.stop(None)
        self.fall_silent()

    def fall_silent(self) -> None:
        """Renew no lease any more, and serve on."""
        if self.registration is not None:
            for lease in self.registration._leases:
                if lease._task is not None:
                    lease._task.cancel()

    async def close(self) -> None:
        if self.registration is not None:
            await self.registration.close()
            self.registration = None
        if self.server is not None:
            server, self.server = self.server, None
            await server.stop(None)


@dataclass
class Reserved:
    """One request at the fake decode rank."""

    request: decode_pb2.ReserveRequest
    nonce: int
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


@dataclass
class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServicer):
    """A decode rank; tokens flow as soon as prefill closed the ticket."""

    step_s: float = 0.001
    reserve_error: TandemError | None = None
    queue_s: float = 0.0
    fail_after: int = 0
    """Send an error instead of this output token; 0: never."""
    fail_error: TandemError = field(
        default_factory=lambda: OutOfBlocksError("the KV pool is full and nothing can be preempted")
    )
    hold_after: int = 0
    """Send nothing from this output token on; 0: never."""
    skip_token: int = 0
    """Leave this output token out; 0: none."""
    repeat_tokens: bool = False
    burst: bool = False
    """Send all deltas of a request in one frame."""
    requests: dict[str, Reserved] = field(default_factory=dict)
    seen: list[decode_pb2.ReserveRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_streams: int = 0
    _streams: dict[str, asyncio.Queue[decode_pb2.Frame]] = field(default_factory=dict)

    async def start(self, control: str, port: int = 0) -> None:
        listen = Listen(bind="127.0.0.1", port=port)
        self.server = create_server(CREDENTIALS)
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self.server)
        self.address = listen.address(bind_port(self.server, listen, CREDENTIALS))
        await self.server.start()
        await self.join(control, common_pb2.ROLE_DECODE)

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: object
    ) -> AsyncIterator[decode_pb2.ReserveUpdate]:
        self.seen.append(request)
        if self.reserve_error is not None:
            rejected = error_to_proto(self.reserve_error, request.request_id)
            yield decode_pb2.ReserveUpdate(rejected=rejected)
            return
        if self.queue_s:
            queued = decode_pb2.Queued(position=1, reason="no blocks free")
            yield decode_pb2.ReserveUpdate(queued=queued)
            await asyncio.sleep(self.queue_s)
        reserved = Reserved(request, secrets.randbits(63) + 1)
        self.requests[request.request_id] = reserved
        reserved.task = asyncio.create_task(self._decode(reserved))
        ticket = decode_pb2.TransferTicket(
            request_id=request.request_id,
            decode=self.identity,
            decode_address=self.address,
            nonce=reserved.nonce,
            layout_fingerprint=self.layout,
            block_ids=[1],
            timeout_s=30,
        )
        yield decode_pb2.ReserveUpdate(ticket=ticket)

    async def CloseTicket(
        self, request: decode_pb2.CloseTicketRequest, context: object
    ) -> decode_pb2.CloseTicketResponse:
        reserved = self.requests.get(request.request_id)
        if reserved is not None and reserved.nonce == request.nonce:
            if request.outcome == decode_pb2.TICKET_OUTCOME_SENT:
                reserved.arrived.set()
                return decode_pb2.CloseTicketResponse()
            self._free(request.request_id)
            if request.outcome == decode_pb2.TICKET_OUTCOME_FAILED:
                delta = decode_pb2.TokenDelta(
                    request_id=request.request_id,
                    finish_reason=common_pb2.FINISH_REASON_ERROR,
                    error=request.error,
                )
                self.send(reserved.request.router_id, [delta])
        return decode_pb2.CloseTicketResponse()

    async def Abort(
        self, request: decode_pb2.AbortRequest, context: object
    ) -> decode_pb2.AbortResponse:
        self.aborted.append(request.request_id)
        return decode_pb2.AbortResponse(known=self._free(request.request_id))

    async def Frames(
        self, request: decode_pb2.FramesRequest, context: object
    ) -> AsyncIterator[decode_pb2.Frame]:
        frames: asyncio.Queue[decode_pb2.Frame] = asyncio.Queue()
        self._streams[request.router_id] = frames
        self.num_streams += 1
        try:
            yield decode_pb2.Frame(decode=self.identity)
            while True:
                yield await frames.get()
        finally:
            self.num_streams -= 1

    def send(self, router_id: str, deltas: Sequence[decode_pb2.TokenDelta]) -> None:
        """One frame."""
        load = decode_pb2.LoadReport(num_requests_running=len(self.requests), num_total_blocks=10)
        frame = decode_pb2.Frame(decode=self.identity, deltas=deltas, load=load)
        self._streams[router_id].put_nowait(frame)

    async def _decode(self, reserved: Reserved) -> None:
        request = reserved.request
        await reserved.arrived.wait()
        params = sampling_from_proto(request.sampling)
        tokens = self.script(request.prompt_token_ids)
        deltas = []
        for index in range(1, params.max_tokens):
            await asyncio.sleep(0 if self.burst else self.step_s)
            if index == self.hold_after:
                await asyncio.Event().wait()
            if index == self.skip_token:
                continue
            deltas.append(self._delta(request, tokens, index))
            finished = bool(deltas[-1].finish_reason)
            if finished or not self.burst:
                self.send(request.router_id, deltas)
                deltas = []
            if finished:
                break
        self.requests.pop(request.request_id, None)

    def _delta(
        self, request: decode_pb2.ReserveRequest, tokens: list[int], index: int
    ) -> decode_pb2.TokenDelta:
        params = sampling_from_proto(request.sampling)
        delta = decode_pb2.TokenDelta(request_id=request.request_id, start_index=index)
        if index == self.fail_after:
            delta.finish_reason = common_pb2.FINISH_REASON_ERROR
            delta.error.CopyFrom(error_to_proto(self.fail_error, request.request_id))
            return delta
        prompt_length = len(request.prompt_token_ids)
        finish = finish_reason_after(
            tokens[index],
            num_output_tokens=index + 1,
            num_tokens=prompt_length + index + 1,
            params=params,
            max_model_len=MAX_MODEL_LEN,
        )
        first = index - 1 if self.repeat_tokens else index
        delta.start_index = first
        delta.token_ids.extend(tokens[first : index + 1])
        delta.finish_reason = finish_reason_to_proto(finish)
        if params.num_logprobs >= 0:
            delta.logprobs.extend(
                position_logprobs(token, params.num_logprobs) for token in tokens[first : index + 1]
            )
        if index == 1:
            delta.timings.kv_transfer_s = 0.002
        return delta

    def _free(self, request_id: str) -> bool:
        reserved = self.requests.pop(request_id, None)
        if reserved is not None and reserved.task is not None:
            reserved.task.cancel()
        return reserved is not None


@dataclass
class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServicer):
    """A prefill worker; answers the first token, then tells decode that the KV is there."""

    run_s: float = 0.0
    run_error: TandemError | None = None
    seen: list[prefill_pb2.RunRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    close_first: bool = False
    """Let decode begin before the first token is answered."""
    transfer_error: TandemError | None = None
    """Fail transfers so, after the first token."""
    num_failing: int = 1 << 30
    """How many fail before one succeeds."""
    num_transfers: int = 0

    async def start(self, control: str, port: int = 0) -> None:
        listen = Listen(bind="127.0.0.1", port=port)
        self.server = create_server(CREDENTIALS)
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, self.server)
        self.address = listen.address(bind_port(self.server, listen, CREDENTIALS))
        await self.server.start()
        self._pushes: set[asyncio.Task[None]] = set()
        await self.join(control, common_pb2.ROLE_PREFILL)

    async def Run(
        self, request: prefill_pb2.RunRequest, context: object
    ) -> prefill_pb2.RunResponse:
        self.seen.append(request)
        try:
            if self.run_error is not None:
                error = error_to_proto(self.run_error, request.request_id)
                return prefill_pb2.RunResponse(error=error)
            if self.close_first:
                await self._push(request.ticket, done=False)
            await asyncio.sleep(self.run_s)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        params = sampling_from_proto(request.sampling)
        prompt = request.prompt_token_ids
        token = self.script(prompt)[0]
        finish = finish_reason_after(
            token,
            num_output_tokens=1,
            num_tokens=len(prompt) + 1,
            params=params,
            max_model_len=MAX_MODEL_LEN,
        )
        first = prefill_pb2.FirstToken(
            token_id=token,
            finish_reason=finish_reason_to_proto(finish),
            num_cached_tokens=len(prompt) // 2,
            timings=common_pb2.Timings(prefill_queue_s=0.001, prefill_compute_s=0.003),
        )
        if params.num_logprobs >= 0:
            first.logprobs.CopyFrom(position_logprobs(token, params.num_logprobs))
        if params.num_prompt_logprobs >= 0:
            first.prompt_logprobs.extend(
                position_logprobs(token, params.num_prompt_logprobs) for token in prompt[1:]
            )
        push = asyncio.create_task(self._push(request.ticket, done=finish is not None))
        self._pushes.add(push)
        push.add_done_callback(self._pushes.discard)
        return prefill_pb2.RunResponse(first_token=first)

    async def _push(self, ticket: decode_pb2.TransferTicket, *, done: bool) -> None:
        outcome = decode_pb2.TICKET_OUTCOME_NOT_NEEDED if done else decode_pb2.TICKET_OUTCOME_SENT
        self.num_transfers += 1
        error = None
        if self.transfer_error is not None and self.num_transfers <= self.num_failing:
            await asyncio.sleep(0.02)  # the first token is out
            outcome = decode_pb2.TICKET_OUTCOME_FAILED
            error = error_to_proto(self.transfer_error)
        async with open_channel(ticket.decode_address, CREDENTIALS) as channel:
            await decode_pb2_grpc.DecodeStub(channel).CloseTicket(
                decode_pb2.CloseTicketRequest(
                    request_id=ticket.request_id,
                    nonce=ticket.nonce,
                    decode_epoch=ticket.decode.epoch,
                    prefill=self.identity,
                    outcome=outcome,
                    error=error,
                )
            )


def position_logprobs(token_id: int, count: int) -> common_pb2.PositionLogprobs:
    """A made-up distribution in which ``token_id`` is the best."""
    return common_pb2.PositionLogprobs(
        logprob=-0.5,
        top_ids=[token_id + i for i in range(count)],
        top_logprobs=[-0.5 - i for i in range(count)],
    )
