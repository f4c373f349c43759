"""The gRPC face of a decode rank: translates, decides nothing about requests.

Every error that a caller can be told travels as a typed `Error` in the response. Reserve is
answered at once: what the engine loop says of the request later is told by its claim and its
frames. Claim is a long call, and is cancelled by whoever does not need the ticket any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial

import grpc

from decode.bridge import RankBridge
from decode.frames import Delta, fill_frame
from decode.metrics import DecodeMetrics
from decode.outboxes import Outboxes
from decode.places import Places
from decode.requests import DecodeRequest, TicketUpdate, writer_key
from decode.validation import RankFacts, Validation
from grammar.constraints import AnyMatcher, Constraints
from runtime.errors import DrainingError, RequestCancelledError, TandemError
from runtime.logging import fields, get_logger
from runtime.pb import common_pb2, decode_pb2, decode_pb2_grpc, registry_pb2
from runtime.rpc.wire import error_to_proto
from runtime.sampling import FinishReason

logger = get_logger(__name__)

DRAIN_POLL_S = 0.05

ReserveContext = grpc.aio.ServicerContext[decode_pb2.ReserveRequest, decode_pb2.ReserveResponse]
ClaimContext = grpc.aio.ServicerContext[decode_pb2.ClaimRequest, decode_pb2.ClaimResponse]
RenewContext = grpc.aio.ServicerContext[
    decode_pb2.RenewTicketsRequest, decode_pb2.RenewTicketsResponse
]
CloseContext = grpc.aio.ServicerContext[
    decode_pb2.CloseTicketsRequest, decode_pb2.CloseTicketsResponse
]
AbortContext = grpc.aio.ServicerContext[decode_pb2.AbortRequest, decode_pb2.AbortResponse]
FramesContext = grpc.aio.ServicerContext[decode_pb2.FramesRequest, decode_pb2.Frame]
DrainContext = grpc.aio.ServicerContext[common_pb2.DrainRequest, common_pb2.DrainResponse]


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """Serves one rank."""

    def __init__(
        self,
        facts: RankFacts,
        bridge: RankBridge,
        outboxes: Outboxes,
        *,
        places: Places,
        constraints: Constraints,
        metrics: DecodeMetrics,
        load: Callable[[], registry_pb2.WorkerLoad],
        on_drain: Callable[[], None],
    ) -> None:
        """`load` is the latest report; `on_drain` is called when draining begins."""
        self._facts = facts
        self._bridge = bridge
        self._outboxes = outboxes
        self._validation = Validation(facts, places)
        self._constraints = constraints
        self._metrics = metrics
        self._load = load
        self._on_drain = on_drain
        self._draining = False

    def refuse_new(self) -> None:
        """Refuse reservations from now on."""
        if not self._draining:
            self._draining = True
            self._on_drain()

    async def start_drain(self, deadline_s: float) -> None:
        """Refuse reservations, give back what holds nothing, and after the time all the rest.

        The earliest deadline counts.
        """
        self.refuse_new()
        with contextlib.suppress(DrainingError):  # the engine loop has ended, and answered all
            await self._bridge.start_drain(deadline_s, self._draining_error())

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: ReserveContext
    ) -> decode_pb2.ReserveResponse:
        """Take the request on."""
        try:
            if self._draining:
                raise self._draining_error()
            self._validation.take_place(request)
            reservation = await self._reserve(request)
        except TandemError as error:
            self._metrics.rejected(error)
            return decode_pb2.ReserveResponse(error=error_to_proto(error, request.request_id))
        return decode_pb2.ReserveResponse(reservation=reservation)

    async def Claim(
        self, request: decode_pb2.ClaimRequest, context: ClaimContext
    ) -> decode_pb2.ClaimResponse:
        """Wait for the ticket of a reservation."""
        try:
            update = await self._bridge.claim(partial(self._validation.make_claim, request))
        except TandemError as error:
            logger.info(
                "refused a claim %s",
                fields(
                    prefill=request.prefill.instance,
                    request_id=request.request_id,
                    error=error.message,
                ),
            )
            return decode_pb2.ClaimResponse(error=error_to_proto(error, request.request_id))
        # Nothing is awaited from here on: whoever cancels the call has cancelled the claim, too.
        response = decode_pb2.ClaimResponse(ticket=self._ticket(request.request_id, update))
        if not request.has_endpoint or request.fence_generation < update.fence_generation:
            logger.info("meets a prefill worker %s", fields(prefill=writer_key(request.prefill)))
            response.endpoint.CopyFrom(self._facts.endpoint(request.prefill))
        return response

    async def RenewTickets(
        self, request: decode_pb2.RenewTicketsRequest, context: RenewContext
    ) -> decode_pb2.RenewTicketsResponse:
        """Prompts of these tickets are still being computed."""
        nonces = list(request.nonces)
        try:
            self._validation.check_epoch(request.decode_epoch)
            unknown = await self._bridge.renew(nonces, writer_key(request.prefill))
        except TandemError:
            unknown = nonces  # of another life, or the loop is over: nothing waits any more
        return decode_pb2.RenewTicketsResponse(unknown=unknown)

    async def CloseTickets(
        self, request: decode_pb2.CloseTicketsRequest, context: CloseContext
    ) -> decode_pb2.CloseTicketsResponse:
        """Prefill ranks will write no more under these tickets."""
        try:
            self._validation.check_epoch(request.decode_epoch)
            unknown = await self._bridge.close_tickets(request)
        except TandemError as error:
            return decode_pb2.CloseTicketsResponse(error=error_to_proto(error))
        return decode_pb2.CloseTicketsResponse(unknown=unknown)

    async def Abort(
        self, request: decode_pb2.AbortRequest, context: AbortContext
    ) -> decode_pb2.AbortResponse:
        """The router has no more use for the request."""
        error = RequestCancelledError(request.reason or "aborted by the router")
        try:
            known = await self._bridge.abort(
                request.request_id, error, only_without_ticket=request.only_without_ticket
            )
        except TandemError:
            known = False  # the loop is over, and has answered everything
        return decode_pb2.AbortResponse(known=known)

    async def Frames(
        self, request: decode_pb2.FramesRequest, context: FramesContext
    ) -> AsyncIterator[decode_pb2.Frame]:
        """The news of all requests of one router, a frame a step."""
        resume = {point.request_id: point.next_index for point in request.resume}
        news = self._outboxes.stream(request.router_id, resume)
        async with contextlib.aclosing(news) as stream:
            async for deltas in stream:
                frame = decode_pb2.Frame(decode=self._facts.identity, load=self._load())
                fill_frame(frame, deltas)
                yield frame

    async def Drain(
        self, request: common_pb2.DrainRequest, context: DrainContext
    ) -> common_pb2.DrainResponse:
        """Take nothing new; answers when nobody is left, or shortly before the call's deadline."""
        await self.start_drain(max(0.0, request.deadline_s))
        remaining_s = context.time_remaining()
        end = None if remaining_s is None else time.monotonic() + 0.8 * remaining_s
        num_left, num_tokens = await self._num_live()
        while num_left and (end is None or time.monotonic() < end):
            await asyncio.sleep(DRAIN_POLL_S)
            num_left, num_tokens = await self._num_live()
        return common_pb2.DrainResponse(num_requests_left=num_left, num_tokens_left=num_tokens)

    async def wait_until_empty(self) -> None:
        """Return when nothing is left, neither a request nor a block in quarantine."""
        while not await self._bridge.is_empty():
            await asyncio.sleep(DRAIN_POLL_S)

    async def _reserve(self, message: decode_pb2.ReserveRequest) -> decode_pb2.Reservation:
        """Hand a request with a place to the engine loop."""
        self._outboxes.expect(message.router_id, message.request_id, message.num_output_tokens)
        is_taken_on = False
        try:
            request = await self._validation.make_request(message)
            making = self._begin_matching(request)
            self._bridge.reserve(request)
            is_taken_on = True
            if making is not None:
                self._bridge.match(request, making)
        finally:
            if not is_taken_on:
                # Refused, or the call was cancelled: nobody will ever say that it is over.
                self._end_unknown(message)
        return decode_pb2.Reservation(
            request_id=request.request_id,
            decode=self._facts.identity,
            decode_address=self._facts.address,
            nonce=request.nonce,
        )

    def _begin_matching(self, request: DecodeRequest) -> Future[AnyMatcher | None] | None:
        """Have a grammar compiled, if there is one: the request can wait for its KV meanwhile."""
        inner = request.request
        if inner.is_ready:
            return None
        return self._constraints.begin(inner.sampling, tuple(inner.output_token_ids))

    def _end_unknown(self, message: decode_pb2.ReserveRequest) -> None:
        end = Delta(
            request_id=message.request_id,
            start_index=message.num_output_tokens,
            finish_reason=FinishReason.ABORT,
            is_silent=True,
        )
        self._outboxes.put({message.router_id: [end]})

    async def _num_live(self) -> tuple[int, int]:
        try:
            return await self._bridge.num_live()
        except DrainingError:
            return (0, 0)  # the loop is over, and has answered everybody

    def _draining_error(self) -> DrainingError:
        return DrainingError(f"{self._facts.identity.instance} is draining: choose another")

    def _ticket(self, request_id: str, update: TicketUpdate) -> decode_pb2.TransferTicket:
        return decode_pb2.TransferTicket(
            request_id=request_id,
            decode=self._facts.identity,
            nonce=update.nonce,
            num_cached_tokens=update.num_cached_tokens,
            block_ids=update.block_ids,
            metadata_slot=update.metadata_slot,
            timeout_s=update.timeout_s,
            fence_generation=update.fence_generation,
        )
