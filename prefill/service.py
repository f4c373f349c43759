"""The gRPC service of a prefill worker: Run, Revoke, Drain. On the event loop of
rank 0, or of every data-parallel rank.

A Run is checked whole and has shaken hands with its decode rank before the engine loop hears of it;
the loop then answers with the first token while the KV still moves. Errors are answers
(`RunResponse.error`), never gRPC statuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import grpc.aio

from engine.request import Request
from kv_transfer.ticket import PeerEndpoint, SendTicket
from prefill.live_runs import LiveRun, LiveRuns
from prefill.messages import AddRequest, CancelRequest, Command, FirstTokenSampled
from prefill.nonces import NonceMemory, NonceState
from prefill.peers import PeerDirectory
from prefill.request import PrefillRequest
from prefill.validation import RunLimits, check_identity, check_run
from runtime.errors import (
    DeadlineExceededError,
    DrainingError,
    InternalError,
    RequestCancelledError,
    StaleTicketError,
    TandemError,
)
from runtime.logging import fields, get_logger
from runtime.pb import common_pb2, prefill_pb2, prefill_pb2_grpc
from runtime.sampling import SamplingParams
from runtime.wire import (
    error_to_proto,
    finish_reason_to_proto,
    logprobs_to_proto,
    same_identity,
    sampling_from_proto,
)

DRAIN_ANSWER_MARGIN_S = 0.2

logger = get_logger(__name__)


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """Calls come in here; `LiveRuns` carries what the engine loop says of them."""

    def __init__(
        self,
        limits: RunLimits,
        runs: LiveRuns,
        nonces: NonceMemory,
        peers: PeerDirectory,
        submit: Callable[[Command], None],
        *,
        on_draining: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve nothing by itself: add it to a server.

        Args:
            limits: what the worker can serve.
            runs: live calls.
            nonces: tickets that were seen.
            peers: handshakes.
            submit: hands a command to the engine loop.
            on_draining: called when the worker begins to refuse requests.
            clock: the engine loop's.
        """
        self._limits = limits
        self._runs = runs
        self._nonces = nonces
        self._peers = peers
        self._submit = submit
        self._on_draining = on_draining
        self._clock = clock
        self._is_draining = False

    async def Run(
        self,
        request: prefill_pb2.RunRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> prefill_pb2.RunResponse:
        """Compute, push, answer with the first token; a cancelled call cancels the request."""
        try:
            return prefill_pb2.RunResponse(first_token=await self._run(request))
        except TandemError as error:
            logger.info("refused %s", fields(request_id=request.request_id, reason=error.message))
            return prefill_pb2.RunResponse(error=error_to_proto(error, request.request_id))

    async def Revoke(
        self,
        request: prefill_pb2.RevokeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> prefill_pb2.RevokeResponse:
        """Answer once no rank will ever write under the nonce; also for one never seen."""
        if not same_identity(request.prefill, self._limits.identity):
            return prefill_pb2.RevokeResponse(drained=False)
        run = self._runs.get(request.nonce)
        if run is not None:
            run.revoked = RequestCancelledError("decode revoked the ticket")
            if run.is_queued:
                self._submit(CancelRequest(request.nonce, run.revoked))
            await run.finished.wait()
        if self._nonces.state(request.nonce) is NonceState.UNDRAINED:
            return prefill_pb2.RevokeResponse(drained=False)
        self._nonces.set_state(request.nonce, NonceState.REVOKED, request.remember_s)
        return prefill_pb2.RevokeResponse(drained=True)

    async def Drain(
        self,
        request: prefill_pb2.PrefillDrainRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> prefill_pb2.PrefillDrainResponse:
        """Refuse new requests, and answer when none is left or just before the call's deadline."""
        self.start_draining()
        remaining_s = context.time_remaining()
        timeout_s = None if remaining_s is None else max(remaining_s - DRAIN_ANSWER_MARGIN_S, 0.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._runs.wait_empty()
        return prefill_pb2.PrefillDrainResponse(num_requests_left=len(self._runs))

    def start_draining(self) -> None:
        """Refuse new requests from now on."""
        if not self._is_draining:
            self._is_draining = True
            self._on_draining()

    async def _run(self, request: prefill_pb2.RunRequest) -> prefill_pb2.FirstToken:
        arrived_at = self._clock()
        run = self._runs.claim(request)
        item = await self._prepare(run, request, arrived_at)
        run.is_queued = True
        self._submit(AddRequest(item))
        try:
            answer = await run.answer
        except asyncio.CancelledError:
            error = RequestCancelledError("the caller of Run went away")
            self._submit(CancelRequest(item.nonce, error))
            raise
        if isinstance(answer, TandemError):
            raise answer
        return first_token_to_proto(answer)

    async def _prepare(
        self, run: LiveRun, request: prefill_pb2.RunRequest, arrived_at: float
    ) -> PrefillRequest:
        """Check the call and meet its decode rank; where that fails the ticket is closed."""
        try:
            check_identity(request, self._limits)
        except StaleTicketError as error:
            self._runs.refuse(run, error, drained=False)  # a former life may have written
            raise
        try:
            self._check_open()
            sampling = sampling_from_proto(request.sampling)
            check_run(request, sampling, self._limits)
            peer = await self._meet(request)
            if run.revoked is not None:
                raise run.revoked
            self._check_open()
            return make_item(request, sampling, peer, arrived_at, self._limits)
        except TandemError as error:
            self._runs.refuse(run, error)
            raise
        except asyncio.CancelledError:
            self._runs.refuse(run, RequestCancelledError("the caller of Run went away"))
            raise
        except Exception as error:
            logger.exception("a call of Run failed %s", fields(request_id=request.request_id))
            failure = InternalError(f"{type(error).__name__}: {error}")
            self._runs.refuse(run, failure)
            raise failure from error

    def _check_open(self) -> None:
        if self._is_draining:
            raise DrainingError(f"{self._limits.identity.instance} is draining: use another one")
        if self._runs.loop_ended.done():
            raise self._runs.loop_ended.result().refusal

    async def _meet(self, request: prefill_pb2.RunRequest) -> PeerEndpoint:
        ticket = request.ticket
        try:
            async with asyncio.timeout(min(request.timeout_s, ticket.timeout_s)):
                return await self._peers.endpoint(
                    ticket.decode, ticket.decode_address, ticket.fence_generation
                )
        except TimeoutError:
            raise DeadlineExceededError(
                f"the request's time was over while meeting decode at {ticket.decode_address}"
            ) from None


def make_item(
    request: prefill_pb2.RunRequest,
    sampling: SamplingParams,
    peer: PeerEndpoint,
    arrived_at: float,
    limits: RunLimits,
) -> PrefillRequest:
    """A checked call as the engine loop takes it."""
    ticket = request.ticket
    num_tokens = len(request.prompt_token_ids)
    inner = Request(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids),
        sampling=sampling,
        cache_salt=request.cache_salt,
    )
    inner.update_block_hashes(limits.block_size)  # here, not on the engine loop's thread
    return PrefillRequest(
        request=inner,
        ticket=SendTicket(
            request_id=request.request_id,
            nonce=ticket.nonce,
            epoch=ticket.decode.epoch,
            block_ids=tuple(ticket.block_ids),
            slot=ticket.metadata_slot,
            timeout_s=ticket.timeout_s,
            fence_generation=ticket.fence_generation,
        ),
        peer=peer,
        num_decode_cached_blocks=ticket.num_cached_tokens // limits.block_size,
        deadline=arrived_at + min(request.timeout_s, ticket.timeout_s),
        arrived_at=arrived_at,
        decode_goes_on=sampling.max_tokens > 1 and num_tokens + 1 < limits.max_model_len,
    )


def first_token_to_proto(event: FirstTokenSampled) -> prefill_pb2.FirstToken:
    """The answer of Run."""
    return prefill_pb2.FirstToken(
        token_id=event.token_id,
        logprobs=logprobs_to_proto(event.logprobs) if event.logprobs else None,
        prompt_logprobs=[logprobs_to_proto(item) for item in event.prompt_logprobs],
        finish_reason=finish_reason_to_proto(event.finish_reason),
        num_cached_tokens=event.num_cached_tokens,
        timings=common_pb2.Timings(
            prefill_queue_s=event.queue_s, prefill_compute_s=event.compute_s
        ),
    )
