"""One try of one generation on one pair: Reserve > Run > frames.

The ticket from decode goes to prefill; prefill's answer is the first token and goes to the client
at once; the rest comes in decode's frames. Both legs are watched together: whichever fails ends the
attempt, and the other is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from router.pool.members import Member, WorkerKey
from router.pool.view import PoolView
from router.requests.clients import WorkerClients
from router.requests.frames import FrameStreams
from router.requests.generation import Generation
from router.requests.sink import AttemptSink
from router.routing.policy import Pair
from runtime.errors import (
    ErrorCode,
    InternalError,
    PeerLostError,
    RequestCancelledError,
    TandemError,
)
from runtime.logging import get_logger
from runtime.pb import decode_pb2, prefill_pb2
from runtime.rpc import map_rpc_errors
from runtime.wire import error_from_proto, sampling_to_proto

logger = get_logger(__name__)

ABORT_TIMEOUT_S = 5.0
REVOCATION_REASON_S = 0.5
OF_A_TICKET = frozenset({ErrorCode.PEER_LOST, ErrorCode.TRANSFER_FAILED})
"""Errors of decode's frames that may be prefill's words."""

T = TypeVar("T")


class Workers:
    """How a router process reaches workers: its view of the pool, channels, token streams."""

    def __init__(
        self, pool: PoolView, clients: WorkerClients, frames: FrameStreams, router_id: str
    ) -> None:
        """``router_id`` names this process to decode ranks and is unique in the cluster."""
        self.pool = pool
        self.clients = clients
        self.frames = frames
        self.router_id = router_id
        self._aborts: set[asyncio.Task[None]] = set()

    def follow_pool(self) -> None:
        """Open and close streams and channels as members come and go."""
        self.frames.follow_pool()
        members = {member.key for member in self.pool.members()}
        self.clients.retain(members | self.frames.keys_in_use())

    def abort(self, decode: Member, worker_request_id: str, reason: str) -> None:
        """Tell ``decode`` in the background that a request is over; idempotent there."""
        request = decode_pb2.AbortRequest(request_id=worker_request_id, reason=reason)

        async def call() -> None:
            # The channel is looked up now: the one of before may be closed, its worker gone.
            stub = self.clients.decode(decode)
            try:
                with map_rpc_errors(f"decode {decode.key}"):
                    await stub.Abort(request, timeout=ABORT_TIMEOUT_S)
            except TandemError as error:
                # Where the worker lives and did not hear this, its own deadline frees the request.
                logger.warning("abort was lost request_id=%s error=%s", worker_request_id, error)

        task = asyncio.create_task(call(), name=f"abort-{worker_request_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        """Wait for aborts under way, then end all streams and channels."""
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await self.frames.close()
        await self.clients.close()


class Attempt:
    """Drives one generation through one pair, once."""

    def __init__(
        self,
        workers: Workers,
        generation: Generation,
        pair: Pair,
        *,
        number: int,
        deadline: float,
    ) -> None:
        """``deadline`` is on the event loop's clock; ``number`` counts the attempts from 0."""
        self._workers = workers
        self._generation = generation
        self._sink = AttemptSink(generation)
        self._pair = pair
        self._deadline = deadline
        # Another name per attempt: an abort of the first must not hit the second.
        suffix = f"-r{number}" if number else ""
        self.worker_request_id = generation.request_id + suffix
        self.culprits: set[WorkerKey] = set()
        """After a failure: members that the next attempt must not use."""

    async def run(self) -> None:
        """Return when the last token was handed over; raise what broke either leg."""
        generation, sink, decode = self._generation, self._sink, self._pair.decode
        stream = self._workers.frames.stream(decode)
        generation.phase = "connecting to decode"
        self.culprits = {decode.key}
        await stream.standing()
        stream.attach(self.worker_request_id, sink)
        try:
            with self._workers.pool.in_flight(decode.key):
                ticket = await self._reserve()
                sink.on_first(await self._prefill(ticket))
                generation.phase = "decoding"
                await sink.ended
        finally:
            stream.detach(self.worker_request_id)
            sink.close()
            if not sink.completed:
                reason = f"ended while {generation.phase}"
                self._workers.abort(decode, self.worker_request_id, reason)

    async def _reserve(self) -> decode_pb2.TransferTicket:
        generation, pair = self._generation, self._pair
        generation.phase = "waiting for blocks in decode"
        self.culprits = {pair.decode.key}
        generation.timings.reserve_sent = asyncio.get_running_loop().time()
        request = decode_pb2.ReserveRequest(
            request_id=self.worker_request_id,
            router_id=self._workers.router_id,
            prompt_token_ids=generation.prompt_token_ids,
            sampling=sampling_to_proto(generation.sampling),
            timeout_s=self._time_left(),
            prefill=pair.prefill.identity,
            prefill_address=pair.prefill.address,
            num_prefill_ranks=pair.prefill.num_parts,
            cache_salt=generation.cache_salt,
        )
        stub = self._workers.clients.decode(pair.decode)
        call = stub.Reserve(request, timeout=self._time_left())

        async def ticket() -> decode_pb2.TransferTicket:
            answer: decode_pb2.TransferTicket | None = None
            async for update in call:  # to its end: cancelling the call would give the ticket back
                kind = update.WhichOneof("update")
                if kind == "rejected":
                    raise error_from_proto(update.rejected)
                if kind == "ticket":
                    answer = update.ticket
                elif kind == "queued":
                    generation.phase = f"queued in decode ({update.queued.reason or 'no room'})"
            if answer is None:
                raise InternalError(f"decode {pair.decode.key} ended Reserve without an answer")
            return answer

        return await self._watch(ticket(), call.cancel, "decode", pair.decode.key)

    async def _prefill(self, ticket: decode_pb2.TransferTicket) -> prefill_pb2.FirstToken:
        generation, prefill = self._generation, self._pair.prefill
        generation.phase = "prefilling"
        self.culprits = set()
        generation.timings.run_sent = asyncio.get_running_loop().time()
        request = prefill_pb2.RunRequest(
            request_id=self.worker_request_id,
            expected=prefill.identity,
            prompt_token_ids=generation.prompt_token_ids,
            sampling=sampling_to_proto(generation.sampling),
            ticket=ticket,
            timeout_s=self._time_left(),
            cache_salt=generation.cache_salt,
        )
        call = self._workers.clients.prefill(prefill).Run(request, timeout=self._time_left())

        async def answer() -> prefill_pb2.RunResponse:
            return await call

        with self._workers.pool.in_flight(prefill.key, len(generation.prompt_token_ids)):
            response = await self._watch(answer(), call.cancel, "prefill", prefill.key)
        if response.HasField("error"):
            error = error_from_proto(response.error)
            if error.code in (ErrorCode.OVERLOADED, ErrorCode.DRAINING):
                self.culprits = {prefill.key}
            if error.code is ErrorCode.CANCELLED:
                await self._reason_of_revocation()
            raise error
        return response.first_token

    async def _reason_of_revocation(self) -> None:
        """Raise why decode revoked the ticket, if its frames say so in a moment.

        Prefill only knows that it was told to stop.
        """
        ended = self._sink.ended
        await asyncio.wait({ended}, timeout=REVOCATION_REASON_S)
        if ended.done():
            ended.result()

    async def _watch(
        self, work: Awaitable[T], cancel: Callable[[], object], leg: str, key: WorkerKey
    ) -> T:
        """The result of a call to ``key``, unless decode's frames end the attempt before."""
        task = asyncio.ensure_future(work)
        ended = self._sink.ended
        try:
            watched: set[asyncio.Future[T] | asyncio.Future[None]] = {task, ended}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.culprits = self._blamed(ended, key)
                ended.result()
                raise InternalError(f"decode finished the request before {leg} {key} answered")
            return self._result_of(task, leg, key)
        finally:
            if not task.done():
                cancel()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif not task.cancelled():
                task.exception()  # ended as we were cancelled: somebody has to have seen it

    def _blamed(self, ended: asyncio.Future[None], called: WorkerKey) -> set[WorkerKey]:
        """Whom to avoid after decode's frames have ended the attempt during a call to `called`.

        While prefill runs, they may say what prefill has told decode about the ticket: then either
        may be at fault, and both are suspects only.
        """
        error, decode = ended.exception(), self._pair.decode.key
        if called == decode or self._sink.is_decode_lost:
            return {decode}
        is_of_ticket = isinstance(error, TandemError) and error.code in OF_A_TICKET
        return set() if is_of_ticket else {decode}

    def _result_of(self, task: asyncio.Future[T], leg: str, key: WorkerKey) -> T:
        """The result of a finished call; one that gRPC broke is the loss of ``key``."""
        peer = f"{leg} {key}"
        if task.cancelled():
            raise self._lost(key, f"{peer}: the connection was closed")
        try:
            with map_rpc_errors(peer):
                return task.result()
        except (PeerLostError, RequestCancelledError) as error:
            if error.__cause__ is None:
                raise  # the worker answered, and says this of someone else
            raise self._lost(key, error.message) from error  # a dying server cancels its calls

    def _lost(self, key: WorkerKey, message: str) -> PeerLostError:
        self._workers.pool.mark_failed(key, message)
        self.culprits = {key}
        return PeerLostError(message)

    def _time_left(self) -> float:
        return max(0.001, self._deadline - asyncio.get_running_loop().time())
