"""The gRPC service of a prefill worker: Run, Revoke, Drain. On the event loop of
rank 0, or of every data-parallel rank.

A Run is checked whole and hashed before the engine loop hears of it; the loop asks for the ticket
when the request's turn is near, and answers with the first token while the KV still moves. Errors
are answers (`RunResponse.error`), never gRPC statuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc.aio

from engine.request import Request
from grammar.constraints import Constraints
from prefill.live_runs import LiveRun, LiveRuns
from prefill.messages import AddRequest, CancelRequest, Command, FirstTokenSampled, GiveBack
from prefill.nonces import NonceMemory, NonceState
from prefill.request import PrefillRequest
from prefill.validation import RunLimits, check_identity, check_run
from runtime.budget import Budget, BudgetKind
from runtime.errors import (
    DrainingError,
    InternalError,
    RequestCancelledError,
    TandemError,
)
from runtime.logging import fields, get_logger
from runtime.pb import common_pb2, prefill_pb2, prefill_pb2_grpc
from runtime.rpc.wire import (
    error_to_proto,
    finish_reason_to_proto,
    logprobs_to_proto,
    same_identity,
    sampling_from_proto,
    standing_from_proto,
)
from runtime.sampling import SamplingParams

DRAIN_ANSWER_SHARE = 0.8
"""Of the time of a call, after which it is told what is left."""

logger = get_logger(__name__)


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """Calls come in here; `LiveRuns` carries what the engine loop says of them."""

    def __init__(
        self,
        limits: RunLimits,
        runs: LiveRuns,
        nonces: NonceMemory,
        submit: Callable[[Command], None],
        *,
        constraints: Constraints,
        num_tokens_left: Callable[[], int],
        on_draining: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve nothing by itself: add it to a server.

        Args:
            limits: what the worker can serve.
            runs: live calls.
            nonces: reservations that were seen.
            submit: hands a command to the engine loop.
            constraints: of the model.
            num_tokens_left: context tokens that are still to be computed, told to who drains us.
            on_draining: called when the worker begins to refuse requests.
            clock: the engine loop's.
        """
        self._limits = limits
        self._runs = runs
        self._nonces = nonces
        self._submit = submit
        self._constraints = constraints
        self._num_tokens_left = num_tokens_left
        self._on_draining = on_draining
        self._clock = clock
        self._is_draining = False
        self._end_of_drain: asyncio.TimerHandle | None = None

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
            error = RequestCancelledError("decode revoked the ticket")
            self._submit(CancelRequest(request.nonce, error))
            await run.finished.wait()
        if self._nonces.state(request.nonce) is NonceState.UNDRAINED:
            return prefill_pb2.RevokeResponse(drained=False)
        self._nonces.set_state(request.nonce, NonceState.REVOKED, request.remember_s)
        return prefill_pb2.RevokeResponse(drained=True)

    async def Drain(
        self,
        request: common_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> common_pb2.DrainResponse:
        """Refuse new requests; answers when none is left, or shortly before the call's deadline."""
        self.start_draining(max(0.0, request.deadline_s))
        remaining_s = context.time_remaining()
        timeout_s = None if remaining_s is None else DRAIN_ANSWER_SHARE * remaining_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._runs.wait_empty()
        return common_pb2.DrainResponse(
            num_requests_left=len(self._runs), num_tokens_left=self._num_tokens_left()
        )

    def start_draining(self, deadline_s: float | None = None) -> None:
        """Refuse new requests from now on, and give back what has no ticket yet.

        Args:
            deadline_s: after so long what has no first token is given back, too; the earliest
                deadline counts. None for never.
        """
        if not self._is_draining:
            self._is_draining = True
            self._on_draining()
            self._submit(GiveBack(self._draining_error()))
        if deadline_s is not None:
            self._give_rest_back_in(deadline_s)

    def _give_rest_back_in(self, seconds: float) -> None:
        loop, former = asyncio.get_running_loop(), self._end_of_drain
        if former is not None and former.when() <= loop.time() + seconds:
            return
        if former is not None:
            former.cancel()
        rest = GiveBack(self._draining_error(), also_begun=True)
        self._end_of_drain = loop.call_later(seconds, self._submit, rest)

    async def _run(self, request: prefill_pb2.RunRequest) -> prefill_pb2.FirstToken:
        check_identity(request, self._limits)  # a ticket for another life is none that we can have
        arrived_at = self._clock()
        budget = Budget.start(BudgetKind.REQUEST, request.timeout_s, arrived_at)
        run = self._runs.admit(request, budget)
        item = self._prepare(run, request, arrived_at)
        await self._get_ready(run, item)
        self._submit(AddRequest(item))
        try:
            answer = await run.answer
        except asyncio.CancelledError:
            error = RequestCancelledError("the caller of Run went away")
            self._submit(CancelRequest(run.nonce, error))
            raise
        if isinstance(answer, TandemError):
            raise answer
        return first_token_to_proto(answer)

    def _prepare(
        self, run: LiveRun, request: prefill_pb2.RunRequest, arrived_at: float
    ) -> PrefillRequest:
        """Check the call; nothing has been asked of decode yet, so a refusal costs nothing."""
        try:
            self._check_open()
            sampling = sampling_from_proto(request.sampling)
            check_run(request, sampling, self._limits)
            return make_item(request, sampling, run.budget, arrived_at, self._limits)
        except TandemError as error:
            self._runs.refuse(run, error)
            raise
        except Exception as error:
            logger.exception("a call of Run failed %s", fields(request_id=request.request_id))
            failure = InternalError(f"{type(error).__name__}: {error}")
            self._runs.refuse(run, failure)
            raise failure from error

    async def _get_ready(self, run: LiveRun, item: PrefillRequest) -> None:
        """Wait for the request's grammar; it keeps its place in the queue, which goes by arrival.

        Nothing has been asked of decode yet, and nobody else waits.
        """
        inner = item.request
        if inner.is_ready:
            return
        try:
            making = self._constraints.begin(inner.sampling, inner.output_token_ids)
            async with asyncio.timeout(run.budget.left(self._clock())):
                inner.matcher = await asyncio.wrap_future(making)
            self._check_open()
        except TimeoutError:
            error = run.budget.error("waiting for its grammar", run.request_id)
            self._runs.refuse(run, error)
            raise error from None
        except TandemError as error:
            self._runs.refuse(run, error)
            raise
        except asyncio.CancelledError:
            self._runs.refuse(run, RequestCancelledError("the caller of Run went away"))
            raise

    def _check_open(self) -> None:
        if self._is_draining:
            raise self._draining_error()
        if self._runs.loop_ended.done():
            raise self._runs.loop_ended.result().refusal

    def _draining_error(self) -> DrainingError:
        return DrainingError(f"{self._limits.identity.instance} is draining: use another one")


def make_item(
    request: prefill_pb2.RunRequest,
    sampling: SamplingParams,
    budget: Budget,
    arrived_at: float,
    limits: RunLimits,
) -> PrefillRequest:
    """A checked call as the engine loop takes it."""
    context, num_output = list(request.context_token_ids), request.num_output_tokens
    num_prompt = len(context) - num_output
    if num_output:
        # Whoever goes on has them from the first try.
        sampling = replace(sampling, num_prompt_logprobs=-1)
    inner = Request(
        request_id=request.request_id,
        prompt_token_ids=context[:num_prompt],
        output_token_ids=context[num_prompt:],
        sampling=sampling,
        cache_salt=request.cache_salt,
    )
    inner.update_block_hashes(limits.block_size)  # here, not on the engine loop's thread
    goes_on = num_output + 1 < sampling.max_tokens and len(context) + 1 < limits.max_model_len
    return PrefillRequest(
        request=inner,
        nonce=request.reservation.nonce,
        budget=budget,
        arrived_at=arrived_at,
        waited_s=request.waited_s,
        standing=standing_from_proto(request.standing),
        decode_goes_on=goes_on,
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
            prefill_queue_s=event.queue_s,
            prefill_compute_s=event.compute_s,
            mask_cpu_s=event.mask_cpu_s,
        ),
        index=event.index,
    )
