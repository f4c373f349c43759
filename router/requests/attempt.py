"""One try of one generation on one pair: Reserve > Run > frames.

Decode answers with a place, which goes to prefill with the context: the prompt, and the output that
other attempts have given the client. Prefill claims decode's blocks by itself when its turn comes,
and its answer is the next token, which goes to the client at once; the rest comes in decode's
frames. Both legs are watched together: whichever fails ends the attempt, and the other is
cancelled. See docs/adr/0010-claims.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

from router.metrics.model import ModelMetrics
from router.pool.members import Member, Role, WorkerKey
from router.pool.view import PoolView
from router.requests.aborts import Aborts
from router.requests.cache_streams import CacheStreams
from router.requests.clients import WorkerClients
from router.requests.frames import FrameStream, FrameStreams
from router.requests.generation import Generation
from router.requests.sink import AttemptSink
from router.requests.waiting import first_done
from router.routing.policy import Pair
from runtime.budget import Budget, BudgetKind
from runtime.errors import (
    DeadlineExceededError,
    ErrorCode,
    InternalError,
    PeerLostError,
    RequestCancelledError,
    TandemError,
    TransferFailedError,
)
from runtime.logging import get_logger
from runtime.pb import common_pb2, decode_pb2, prefill_pb2
from runtime.rpc.grpc_calls import map_rpc_errors
from runtime.rpc.wire import error_from_proto, sampling_to_proto, standing_to_proto

logger = get_logger(__name__)

RESERVE_TIMEOUT_S = 10.0
REVOCATION_REASON_S = 0.5
OF_A_TICKET = frozenset({ErrorCode.PEER_LOST, ErrorCode.TRANSFER_FAILED, ErrorCode.STALE_TICKET})
"""Errors of decode's frames that may be prefill's words."""
OF_A_WORKER = frozenset({ErrorCode.OVERLOADED, ErrorCode.DRAINING})
"""Errors that say of whoever speaks that it takes nothing."""

T = TypeVar("T")


class RoomElsewhereError(Exception):
    """The attempt has left its decode rank, which had no room for it; nothing else is wrong."""

    def __init__(self, pair: Pair) -> None:
        """``pair`` has room."""
        super().__init__(str(pair.decode.key))
        self.pair = pair


class Workers:
    """How a router process reaches workers: its view of the pool, channels, token streams."""

    def __init__(
        self,
        pool: PoolView,
        clients: WorkerClients,
        frames: FrameStreams,
        router_id: str,
        metrics: ModelMetrics,
        *,
        caches: CacheStreams | None = None,
    ) -> None:
        """``router_id`` names this process to decode ranks and is unique in the cluster.

        ``caches`` are followed where pairs are picked by what they hold.
        """
        self._caches = caches
        self.pool = pool
        self.clients = clients
        self.frames = frames
        self.router_id = router_id
        self.metrics = metrics
        self._aborts = Aborts(clients, metrics, is_alive=self._is_alive)

    def follow_pool(self) -> None:
        """Open and close streams and channels as members come and go."""
        self.frames.follow_pool()
        if self._caches is not None:
            self._caches.follow_pool()
        members = {member.key for member in self.pool.members()}
        self.clients.retain(members | self.frames.keys_in_use())

    def abort(self, decode: Member, worker_request_id: str, reason: str) -> None:
        """Tell ``decode`` in the background that a request is over; idempotent there."""
        self._aborts.send(decode, worker_request_id, reason)

    async def leave(self, decode: Member, worker_request_id: str) -> bool:
        """End a request at ``decode``, unless it has its ticket; whether it did."""
        return await self._aborts.end_without_ticket(decode, worker_request_id)

    async def close(self) -> None:
        """Wait for aborts under way, then end all streams and channels."""
        await self._aborts.close()
        if self._caches is not None:
            await self._caches.close()
        await self.frames.close()
        await self.clients.close()

    def _is_alive(self, key: WorkerKey) -> bool:
        return self.pool.member(key) is not None or key in self.frames.keys_in_use()


class Attempt:
    """Drives one generation through one pair, once."""

    def __init__(
        self,
        workers: Workers,
        generation: Generation,
        pair: Pair,
        *,
        number: int,
        budget: Budget,
        seek_room: Callable[[], AbstractContextManager[asyncio.Future[Pair]]],
        queued_since: float | None = None,
    ) -> None:
        """``number`` counts the attempts from 0; ``budget`` is the request's in all.

        While ``seek_room`` is entered it looks for a pair with room, should this one have none;
        ``queued_since``: when the request came into prefill's queue; None: not yet.
        """
        self._workers = workers
        self._generation = generation
        self._loop = generation.loop
        self._sink = AttemptSink(generation)
        self._pair, self._budget = pair, budget
        self._seek_room = seek_room
        self.queued_since = queued_since
        self._context = generation.context_token_ids
        self._num_output_tokens = generation.num_tokens
        self._sampling = _sampling_to_send(generation)
        # Another name per attempt: an abort of the first must not hit the second.
        self.worker_request_id = generation.request_id + (f"-r{number}" if number else "")
        self.culprits: set[WorkerKey] = set()
        """After a failure: who is known to be at fault; empty where nobody is."""
        self.has_prefilled = False
        """Whether prefill was given the context: it has some of its KV, or all."""

    @property
    def has_decoded(self) -> bool:
        """Whether decode gave tokens: the pair works, or did."""
        return self._sink.has_decode_tokens

    async def run(self) -> None:
        """Return when the last token was handed over; raise what broke either leg."""
        generation, sink, decode = self._generation, self._sink, self._pair.decode
        stream = self._workers.frames.stream(decode)
        generation.phase = "connecting to decode"
        generation.workers = self._pair.keys
        generation.worker_request_id = self.worker_request_id
        generation.timings.attempt_started = self._loop.time()
        self.culprits = {decode.key}
        await stream.standing()
        row_id = stream.attach(self.worker_request_id, sink)
        try:
            with self._workers.pool.in_flight(decode.key):
                reservation = await self._reserve(stream, row_id)
                first = await self._prefill(reservation)
                sink.on_first(first)
                self._note_progress(first)
                generation.phase = "decoding"
                await self._decode()
        finally:
            stream.detach(self.worker_request_id)
            sink.close()
            if not sink.completed:
                reason = f"ended while {generation.phase}"
                self._workers.abort(decode, self.worker_request_id, reason)

    async def _reserve(self, stream: FrameStream, row_id: int) -> decode_pb2.Reservation:
        generation, pair = self._generation, self._pair
        generation.phase = "reserving in decode"
        self.culprits = {pair.decode.key}
        if not self._num_output_tokens:
            generation.timings.reserve_sent = time.monotonic()
        request = decode_pb2.ReserveRequest(
            request_id=self.worker_request_id,
            router_id=self._workers.router_id,
            context_token_ids=self._context,
            num_output_tokens=self._num_output_tokens,
            sampling=self._sampling,
            timeout_s=self._time_left(),
            prefill=pair.prefill.identity,
            prefill_address=pair.prefill.address,
            num_prefill_ranks=pair.prefill.num_parts,
            cache_salt=generation.cache_salt,
            standing=standing_to_proto(generation.standing_now()),
            row_id=row_id,
        )
        stub = self._workers.clients.decode(pair.decode)
        num_breaks = stream.num_breaks
        call = stub.Reserve(request, timeout=RESERVE_TIMEOUT_S)
        response = await self._watch(call, Role.DECODE)
        if not self._num_output_tokens:
            generation.timings.reserved = call.answered
        if response.WhichOneof("result") != "reservation":
            raise error_from_proto(response.error)
        if stream.num_breaks != num_breaks:
            # The new stream did not ask for this request, so what the old one lost is lost.
            self.culprits = set()
            raise PeerLostError(f"the stream of decode {pair.decode.key} broke meanwhile")
        self._sink.is_reserved = True
        return response.reservation

    async def _prefill(self, reservation: decode_pb2.Reservation) -> prefill_pb2.FirstToken:
        generation, prefill = self._generation, self._pair.prefill
        generation.phase = "waiting for prefill"
        self.culprits = set()
        self.has_prefilled = True
        now = time.monotonic()
        if self.queued_since is None:
            self.queued_since = now
        if not self._num_output_tokens:
            generation.timings.run_sent = now
        request = prefill_pb2.RunRequest(
            request_id=self.worker_request_id,
            expected=prefill.identity,
            context_token_ids=self._context,
            num_output_tokens=self._num_output_tokens,
            sampling=self._sampling,
            reservation=reservation,
            timeout_s=self._time_left(),
            cache_salt=generation.cache_salt,
            standing=standing_to_proto(generation.standing_now()),
            waited_s=now - self.queued_since,
        )
        call = self._workers.clients.prefill(prefill).Run(request)
        num_tokens = self._pair.num_new_tokens(len(self._context))
        queued = self._workers.pool.in_flight(prefill.key, num_tokens)
        with queued, self._seek_room() as roomy:
            response = await self._watch(call, Role.PREFILL, roomy)
        if not self._num_output_tokens:
            generation.timings.prefilled = call.answered
        if response.WhichOneof("result") != "first_token":
            error = error_from_proto(response.error)
            if error.code in OF_A_WORKER or error.suspect:
                self.culprits = {self._speaker(error, prefill.key)}
            if error.code is ErrorCode.CANCELLED:
                await self._reason_of_revocation()
                # Not by us: we would be cancelled ourselves.
                error = TransferFailedError("decode revoked the ticket, and its reason was lost")
            raise error
        return response.first_token

    async def _decode(self) -> None:
        try:
            await self._sink.ended
        except TandemError as error:
            if error.code is not ErrorCode.CANCELLED:
                self.culprits = self._blamed(error)
                raise
            # Not by us: we would hear no more. Prefill noticed before us that our connection broke,
            # or decode's answer to `leave` was lost.
            failure = TransferFailedError(f"cancelled, and not by its client: {error.message}")
            self.culprits = self._blamed(failure)
            raise failure from error

    def _time_left(self) -> float:
        return max(0.001, self._budget.left(self._loop.time()))

    def _note_progress(self, first: prefill_pb2.FirstToken) -> None:
        """If other workers were lost before, the request has moved with this token."""
        timings = self._generation.timings
        if timings.lost:
            seconds = timings.migrated(self._loop.time())
            self._workers.metrics.migration.observe(seconds)
            text = "a request goes on request_id=%s prefill=%s decode=%s seconds=%.3f "
            text += "context_tokens=%d cached_tokens=%d"
            sizes = len(self._context), first.num_cached_tokens
            logger.info(text, self.worker_request_id, *self._pair.keys, seconds, *sizes)

    async def _reason_of_revocation(self) -> None:
        """Raise why decode revoked the ticket, if its frames say so in a moment.

        Prefill only knows that it was told to stop.
        """
        ended = self._sink.ended
        await asyncio.wait({ended}, timeout=REVOCATION_REASON_S)
        if ended.done():
            await self._decode()

    async def _watch(
        self,
        call: asyncio.Future[T],
        leg: Role,
        roomy: asyncio.Future[Pair] | None = None,
    ) -> T:
        """The result of a call to ``leg``, unless decode's frames or ``roomy`` end the attempt.

        Cancels the call where it is not over then.
        """
        ended = self._sink.ended
        try:
            if roomy is None:
                await first_done(call, ended)
            else:
                await first_done(call, ended, roomy)
                if not call.done() and not ended.done():
                    if await self._workers.leave(self._pair.decode, self.worker_request_id):
                        self._generation.phase = "moving to a decode rank with room"
                        raise RoomElsewhereError(roomy.result())
                    await first_done(call, ended)
            if not call.done():
                await self._decode()
                raise InternalError(f"decode finished the request before {leg.value} answered")
            return self._result_of(call, leg)
        finally:
            if not call.cancel() and not call.cancelled():
                call.exception()  # ended as we were cancelled: somebody has to have seen it

    def _blamed(self, error: TandemError) -> set[WorkerKey]:
        """Whom to avoid after decode's frames have ended the attempt.

        Until decode has begun, they may say what prefill has told decode about the ticket: then
        either may be at fault, and both are suspects only.
        """
        sink = self._sink
        is_of_ticket = sink.is_reserved and not sink.has_decode_tokens and not sink.is_decode_lost
        if is_of_ticket and error.code in OF_A_TICKET:
            return set()
        return {self._speaker(error, self._pair.decode.key)}

    def _speaker(self, error: TandemError, sender: WorkerKey) -> WorkerKey:
        """Whose word ``error`` is: prefill passes on what decode says to its claim, and decode why
        prefill gave a ticket up.
        """
        return next((key for key in self._pair.keys if str(key) == error.relayed_from), sender)

    def _result_of(self, call: asyncio.Future[T], leg: Role) -> T:
        """The result of a finished call; one that gRPC broke is the loss of that worker."""
        if not call.cancelled() and call.exception() is None:
            return call.result()
        key = self._pair.prefill.key if leg is Role.PREFILL else self._pair.decode.key
        peer = f"{leg.value} {key}"
        if call.cancelled():
            raise self._lost(key, f"{peer}: the connection was closed")
        try:
            with map_rpc_errors(peer):
                return call.result()
        except (PeerLostError, RequestCancelledError, DeadlineExceededError) as error:
            if error.__cause__ is None:
                raise  # the worker answered, and says this of someone else
            message = error.message  # a dying server cancels its calls
            if isinstance(error, DeadlineExceededError):
                limit = Budget.start(BudgetKind.CALL, RESERVE_TIMEOUT_S, 0.0)
                message = f"{peer}: {limit.error(self._generation.phase).message}"
            raise self._lost(key, message) from error

    def _lost(self, key: WorkerKey, message: str) -> PeerLostError:
        self._workers.pool.mark_failed(key, message)
        self.culprits = {key}
        return PeerLostError(message)


def _sampling_to_send(generation: Generation) -> common_pb2.SamplingParams:
    sampling = generation.sampling
    if generation.num_tokens:  # the client has the prompt's log-probabilities
        sampling = replace(sampling, num_prompt_logprobs=-1)
    return sampling_to_proto(sampling)
