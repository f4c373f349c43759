"""The gRPC face of a decode rank: checks and translates, decides nothing about requests.

Every error that a caller can be told travels as a typed `Error` in the response. Reserve is a
stream: while the request is queued, its position comes when it changes and at least once a second,
so that a router can tell a long queue from a dead rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from decode.bridge import RankBridge
from decode.frames import Outboxes
from decode.requests import (
    DecodeRequest,
    QueuedUpdate,
    RejectedUpdate,
    ReserveUpdate,
    TicketUpdate,
    Writer,
)
from engine.request import Request
from engine.sampling.inputs import validate_request
from kv_transfer.layout import KVLayout, check_same_layout
from runtime.errors import (
    DrainingError,
    InvalidRequestError,
    RequestCancelledError,
    StaleTicketError,
    TandemError,
    TransferFailedError,
)
from runtime.logging import fields, get_logger
from runtime.pb import common_pb2, decode_pb2, decode_pb2_grpc
from runtime.wire import error_from_proto, error_to_proto, same_identity, sampling_from_proto

logger = get_logger(__name__)

KEEP_ALIVE_S = 1.0
DRAIN_POLL_S = 0.05

ReserveContext = grpc.aio.ServicerContext[decode_pb2.ReserveRequest, decode_pb2.ReserveUpdate]
HandshakeContext = grpc.aio.ServicerContext[
    decode_pb2.HandshakeRequest, decode_pb2.HandshakeResponse
]
CloseContext = grpc.aio.ServicerContext[
    decode_pb2.CloseTicketRequest, decode_pb2.CloseTicketResponse
]
AbortContext = grpc.aio.ServicerContext[decode_pb2.AbortRequest, decode_pb2.AbortResponse]
FramesContext = grpc.aio.ServicerContext[decode_pb2.FramesRequest, decode_pb2.Frame]
DrainContext = grpc.aio.ServicerContext[
    decode_pb2.DecodeDrainRequest, decode_pb2.DecodeDrainResponse
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What one rank says of itself.

    Attributes:
        identity: instance, epoch, rank.
        address: of this service, "host:port".
        transport: name of the KV transport.
        layout: of its KV pool.
        vocab_size: token ids are below it.
        endpoint: makes the answer to a handshake of a prefill worker.
    """

    identity: common_pb2.WorkerIdentity
    address: str
    transport: str
    layout: KVLayout
    vocab_size: int
    endpoint: Callable[[common_pb2.WorkerIdentity], decode_pb2.PeerEndpoint]


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """Serves one rank."""

    def __init__(
        self,
        facts: RankFacts,
        bridge: RankBridge,
        outboxes: Outboxes,
        load: Callable[[], decode_pb2.LoadReport],
        on_drain: Callable[[], None],
    ) -> None:
        """`load` is the latest report; `on_drain` is called when draining begins."""
        self._facts = facts
        self._bridge = bridge
        self._outboxes = outboxes
        self._load = load
        self._on_drain = on_drain
        self._serials = itertools.count()
        self._draining = False

    def start_draining(self) -> None:
        """Refuse reservations from now on."""
        if not self._draining:
            self._draining = True
            self._on_drain()

    async def Handshake(
        self, request: decode_pb2.HandshakeRequest, context: HandshakeContext
    ) -> decode_pb2.HandshakeResponse:
        """Compare layouts; hand out the transport's endpoint."""
        try:
            self._check_handshake(request)
        except TandemError as error:
            logger.warning(
                "refused a handshake %s",
                fields(prefill=request.prefill.instance, error=error.message),
            )
            return decode_pb2.HandshakeResponse(error=error_to_proto(error))
        logger.info("met a prefill worker %s", fields(prefill=request.prefill.instance))
        return decode_pb2.HandshakeResponse(endpoint=self._facts.endpoint(request.prefill))

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: ReserveContext
    ) -> AsyncIterator[decode_pb2.ReserveUpdate]:
        """Queue the request and report until it has its ticket or is rejected."""
        updates: asyncio.Queue[ReserveUpdate] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        try:
            reservation = self._reservation(
                request, lambda update: _put_from_thread(loop, updates, update)
            )
            self._outboxes.expect(request.router_id)
            self._bridge.reserve(reservation)
        except TandemError as error:
            yield decode_pb2.ReserveUpdate(rejected=error_to_proto(error, request.request_id))
            return
        delivered = False
        try:
            async for update in _with_keep_alive(updates):
                yield self._update_to_proto(reservation, update)
            delivered = True
        finally:
            if not delivered:
                # The caller may never have seen the ticket, and so will never abort it.
                reason = RequestCancelledError("the call of Reserve was cancelled")
                self._bridge.abort_reservation(reservation, reason)

    async def CloseTicket(
        self, request: decode_pb2.CloseTicketRequest, context: CloseContext
    ) -> decode_pb2.CloseTicketResponse:
        """A prefill rank will write no more under a ticket."""
        try:
            if request.decode_epoch != self._facts.identity.epoch:
                raise self._stale("the ticket is of another life of this worker")
            await self._bridge.close_ticket(request, _failure_of(request))
        except TandemError as error:
            answer = error_to_proto(error, request.request_id)
            return decode_pb2.CloseTicketResponse(error=answer)
        return decode_pb2.CloseTicketResponse()

    async def Abort(
        self, request: decode_pb2.AbortRequest, context: AbortContext
    ) -> decode_pb2.AbortResponse:
        """The router has no more use for the request."""
        error = RequestCancelledError(request.reason or "aborted by the router")
        try:
            known = await self._bridge.abort(request.request_id, error)
        except TandemError:
            known = False  # the loop is over, and has answered everything
        return decode_pb2.AbortResponse(known=known)

    async def Frames(
        self, request: decode_pb2.FramesRequest, context: FramesContext
    ) -> AsyncIterator[decode_pb2.Frame]:
        """The news of all requests of one router, a frame a step."""
        async with contextlib.aclosing(self._outboxes.stream(request.router_id)) as stream:
            async for deltas in stream:
                yield decode_pb2.Frame(
                    decode=self._facts.identity,
                    deltas=[delta.to_proto() for delta in deltas],
                    load=self._load(),
                )

    async def Drain(
        self, request: decode_pb2.DecodeDrainRequest, context: DrainContext
    ) -> decode_pb2.DecodeDrainResponse:
        """Take nothing new; answers when nothing is left, or shortly before the call's deadline."""
        self.start_draining()
        num_left = await self.wait_until_empty(context.time_remaining())
        return decode_pb2.DecodeDrainResponse(num_requests_left=num_left)

    async def wait_until_empty(self, timeout_s: float | None) -> int:
        """Return the number of requests left: 0, unless the time is over."""
        end = None if timeout_s is None else time.monotonic() + 0.8 * timeout_s
        while not await self._bridge.is_empty():
            if end is not None and time.monotonic() >= end:
                return await self._bridge.num_live()
            await asyncio.sleep(DRAIN_POLL_S)
        return 0

    def _check_handshake(self, request: decode_pb2.HandshakeRequest) -> None:
        facts = self._facts
        if not same_identity(request.expected, facts.identity):
            raise self._stale("the handshake is for another worker or another life of this one")
        if request.transport != facts.transport:
            raise InvalidRequestError(
                f"the transports differ: ours {facts.transport!r}, theirs {request.transport!r}. "
                "Fix: the same kv_transfer.transport on both workers"
            )
        check_same_layout(facts.layout, request.layout_fingerprint, request.layout_description)

    def _stale(self, problem: str) -> StaleTicketError:
        identity = self._facts.identity
        return StaleTicketError(
            f"{problem}: this is {identity.instance} rank {identity.rank} "
            f"epoch {identity.epoch:016x}"
        )

    def _reservation(
        self, message: decode_pb2.ReserveRequest, tell: Callable[[ReserveUpdate], None]
    ) -> DecodeRequest:
        if self._draining:
            raise DrainingError(f"{self._facts.identity.instance} is draining: choose another")
        prompt = list(message.prompt_token_ids)
        sampling = sampling_from_proto(message.sampling)
        if not prompt or sampling.max_tokens < 1 or message.num_prefill_ranks < 1:
            raise InvalidRequestError(
                f"prompt of {len(prompt)} tokens, max_tokens {sampling.max_tokens}, "
                f"num_prefill_ranks {message.num_prefill_ranks}: each must be at least 1"
            )
        validate_request(prompt, sampling, self._facts.vocab_size)
        now = time.monotonic()
        return DecodeRequest(
            request=Request(
                request_id=message.request_id,
                prompt_token_ids=prompt,
                sampling=sampling,
                cache_salt=message.cache_salt,
            ),
            serial=next(self._serials),
            router_id=message.router_id,
            writer=Writer(
                instance=message.prefill.instance,
                epoch=message.prefill.epoch,
                rank=message.prefill.rank,
                num_ranks=message.num_prefill_ranks,
                address=message.prefill_address,
            ),
            received_at=now,
            deadline=now + message.timeout_s,
            tell=tell,
        )

    def _update_to_proto(
        self, request: DecodeRequest, update: ReserveUpdate
    ) -> decode_pb2.ReserveUpdate:
        match update:
            case QueuedUpdate():
                queued = decode_pb2.Queued(position=update.position, reason=update.reason)
                return decode_pb2.ReserveUpdate(queued=queued)
            case RejectedUpdate():
                error = error_to_proto(update.error, request.request_id)
                return decode_pb2.ReserveUpdate(rejected=error)
            case TicketUpdate():
                return decode_pb2.ReserveUpdate(ticket=self._ticket(request, update))

    def _ticket(self, request: DecodeRequest, update: TicketUpdate) -> decode_pb2.TransferTicket:
        facts = self._facts
        return decode_pb2.TransferTicket(
            request_id=request.request_id,
            decode=facts.identity,
            decode_address=facts.address,
            nonce=update.nonce,
            layout_fingerprint=facts.layout.fingerprint(),
            num_cached_tokens=update.num_cached_tokens,
            block_ids=update.block_ids,
            metadata_slot=update.metadata_slot,
            timeout_s=update.timeout_s,
            fence_generation=update.fence_generation,
        )


def _put_from_thread(
    loop: asyncio.AbstractEventLoop, updates: asyncio.Queue[ReserveUpdate], update: ReserveUpdate
) -> None:
    # The event loop may be gone when the engine loop answers what is left at shutdown.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(updates.put_nowait, update)


async def _with_keep_alive(
    updates: asyncio.Queue[ReserveUpdate],
) -> AsyncIterator[ReserveUpdate]:
    """Updates until the last; while queued, the latest one again after each silent second."""
    last: QueuedUpdate | None = None
    while True:
        try:
            update = await asyncio.wait_for(updates.get(), KEEP_ALIVE_S)
        except TimeoutError:
            if last is None:
                continue  # the engine loop has not come to it yet: a long step
            update = last
        yield update
        if not isinstance(update, QueuedUpdate):
            return
        last = update


def _failure_of(request: decode_pb2.CloseTicketRequest) -> TandemError:
    """What the request ends with, should this closing end it."""
    if request.HasField("error"):
        return error_from_proto(request.error)
    who = f"{request.prefill.instance} rank {request.prefill.rank}"
    if request.outcome == decode_pb2.TICKET_OUTCOME_ABANDONED:
        return RequestCancelledError(f"{who} abandoned the transfer")
    return TransferFailedError(f"{who} could not send the KV")
