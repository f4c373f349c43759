"""Calls of Run between their arrival and the last closed part of their ticket.

Lives on the event loop. Turns the engine loop's events into claims, answers, closures for decode
and metrics; and keeps the promise to decode: whoever may have given us a ticket is told once that
no rank will write under it any more, however the request ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prefill.claims import Claims, Wanted
from prefill.closer import TicketCloser
from prefill.messages import (
    Event,
    FirstTokenSampled,
    LoopEnded,
    PartClosed,
    RequestFailed,
    RequestFinished,
    TicketWanted,
)
from prefill.metrics import PrefillMetrics
from prefill.nonces import NonceMemory, NonceState
from prefill.peers import RankAddress, peer_of
from prefill.rank_plan import ClosureOutcome
from runtime.budget import Budget
from runtime.errors import (
    InvalidRequestError,
    RequestCancelledError,
    StaleTicketError,
    TandemError,
    TransferFailedError,
)
from runtime.logging import fields, get_logger
from runtime.pb import common_pb2, decode_pb2, prefill_pb2
from runtime.rpc.wire import error_to_proto
from runtime.trace.context import TraceContext, current_trace

REMEMBER_MARGIN_S = 60.0
MAX_REMEMBER_S = 3600.0

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRun:
    """One call of Run, or what is left of it.

    Attributes:
        request_id: the router's id.
        reservation: as presented; its nonce is the identity of this try.
        num_context_tokens: of the request.
        budget: the request's own time.
        remember_s: how long its nonce is remembered.
        trace: of the call.
        answer: the first token or an error; cancelled when the caller goes away.
        trace: of the call.
        received: when it was, as ``time.monotonic`` counts; so ``answered_at``, when its first
            token or its failure was known, and ``closed_at``, when its KV was sent.
        finished: set when no rank will write any more and the blocks are released.
        parts: what is said of each rank's part of the ticket, by rank.
        is_closed: decode was told of the parts.
        error: why the request ended without a first token, if it did.
        undrained: a rank cannot say whether its last writes are still on their way.
    """

    request_id: str
    reservation: decode_pb2.Reservation
    num_context_tokens: int
    budget: Budget
    remember_s: float
    answer: asyncio.Future[FirstTokenSampled | TandemError]
    trace: TraceContext | None = None
    received: float = 0.0
    answered_at: float = 0.0
    closed_at: float = 0.0
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    parts: dict[int, decode_pb2.PartClosure] = field(default_factory=dict)
    is_closed: bool = False
    error: TandemError | None = None
    undrained: bool = False

    @property
    def nonce(self) -> int:
        """Of the reservation."""
        return self.reservation.nonce


class LiveRuns:
    """All live runs, by nonce."""

    def __init__(
        self,
        identity: common_pb2.WorkerIdentity,
        num_ranks: int,
        *,
        nonces: NonceMemory,
        claims: Claims,
        closer: TicketCloser,
        metrics: PrefillMetrics,
        forget_peer: Callable[[str], None],
        on_finished: Callable[[LiveRun], None] = lambda run: None,
    ) -> None:
        """Start empty.

        Args:
            identity: ours; of rank 0 where several ranks write parts.
            num_ranks: parts of every ticket.
            nonces: reservations that were seen.
            claims: asks decode.
            closer: tells decode.
            metrics: of the worker.
            forget_peer: called with the transport's name of a decode rank that was not reached.
            on_finished: called with each run that is over.
        """
        self._identity = identity
        self._num_ranks = num_ranks
        self._nonces = nonces
        self._claims = claims
        self._closer = closer
        self._metrics = metrics
        self._forget_peer = forget_peer
        self._on_finished = on_finished
        self._runs: dict[int, LiveRun] = {}
        self._is_over = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.loop_ended: asyncio.Future[LoopEnded] = asyncio.get_running_loop().create_future()
        """Done when the engine loop is over, with its last event."""

    def __len__(self) -> int:
        return len(self._runs)

    def admit(self, request: prefill_pb2.RunRequest, budget: Budget) -> LiveRun:
        """Take on a call and use up its nonce.

        Raises:
            InvalidRequestError: there is no reservation.
            StaleTicketError: the nonce was used before, or revoked.
        """
        nonce = request.reservation.nonce
        if nonce == 0:
            raise InvalidRequestError(
                "the call has no reservation: reserve at a decode worker first"
            )
        remember_s = min(max(request.timeout_s, 0.0) + REMEMBER_MARGIN_S, MAX_REMEMBER_S)
        state = NonceState.USED if nonce in self._runs else self._nonces.use(nonce, remember_s)
        if state is not None:
            word = "revoked" if state is NonceState.REVOKED else "used already"
            raise StaleTicketError(f"the reservation {nonce:016x} was {word}: reserve again")
        run = LiveRun(
            request_id=request.request_id,
            reservation=request.reservation,
            num_context_tokens=len(request.context_token_ids),
            budget=budget,
            remember_s=remember_s,
            trace=current_trace(),
            received=time.monotonic(),
            answer=asyncio.get_running_loop().create_future(),
        )
        self._runs[nonce] = run
        self._is_empty.clear()
        return run

    def get(self, nonce: int) -> LiveRun | None:
        """The live run under a nonce."""
        return self._runs.get(nonce)

    def refuse(self, run: LiveRun, error: TandemError) -> None:
        """End a run that the engine loop never heard of."""
        self._metrics.request_ended(error)
        self._finish(run)

    def handle(self, event: Event) -> None:
        """Take one event of the engine loop."""
        if isinstance(event, LoopEnded):
            self._end(event)
            return
        run = self._runs.get(event.nonce)
        if run is None:
            assert self._is_over, event
            return  # `close_left` has ended it
        match event:
            case TicketWanted():
                self._claims.begin(
                    Wanted(
                        request_id=run.request_id,
                        reservation=run.reservation,
                        num_context_tokens=run.num_context_tokens,
                        budget=run.budget,
                        trace=run.trace,
                    )
                )
            case FirstTokenSampled():
                self._answer(run, event)
                self._metrics.first_token(event, run.num_context_tokens)
            case RequestFailed(_, error):
                run.error = error
                self._answer(run, error)
                self._metrics.request_ended(error)
            case PartClosed():
                self._part_closed(run, event)
            case RequestFinished():
                self._finish(run)

    async def wait_empty(self) -> None:
        """Return when no run is left and decode was told of every closed part."""
        while self._runs or self._closer.num_pending:
            await self._is_empty.wait()
            await self._closer.flush()

    def note_undrained(self, nonce: int) -> None:
        """Our sender has closed the ticket, and a write of it may still be on its way."""
        run = self._runs.get(nonce)
        if run is not None:
            run.undrained = True

    def close_left(self, rank: int, error: TandemError) -> None:
        """After the engine loop's end: close one rank's part of what is left.

        Only for a rank whose sender is closed, so that it posts nothing more; what it could not
        complete it has told `note_undrained`. A ticket that the engine loop was never given is
        closed for all ranks.
        """
        self._is_over = True
        for run in list(self._runs.values()):
            run.error = run.error or error
            if self._claims.is_granted(run.nonce) and not run.is_closed:
                self._add_unwritten(run, [rank])
                self._close(run)
                run.undrained |= self._num_ranks > 1  # nobody can speak for the other ranks
            self._finish(run)

    def _end(self, event: LoopEnded) -> None:
        # Those, too, that were handed over before the end and that the loop had not come to.
        for run in self._runs.values():
            self._answer(run, event.failure_of())
        if not self.loop_ended.done():
            self.loop_ended.set_result(event)

    def _answer(self, run: LiveRun, answer: FirstTokenSampled | TandemError) -> None:
        self._claims.stop_renewing(run.nonce)
        if not run.answer.done():
            run.answered_at = time.monotonic()
            run.answer.set_result(answer)

    def _part_closed(self, run: LiveRun, event: PartClosed) -> None:
        closure, decode = event.closure, run.reservation.decode
        if closure.outcome is ClosureOutcome.FAILED:
            self._forget_peer(peer_of(decode))
            run.undrained |= not closure.drained
        outcome, error = ticket_outcome(event), closing_error(event)
        self._metrics.part_closed(event, outcome, f"{decode.instance}/{decode.rank}")
        run.parts[event.rank] = decode_pb2.PartClosure(
            rank=self._identity.rank + event.rank,
            outcome=outcome,
            error=error_to_proto(error, run.request_id) if error else None,
            timings=common_pb2.Timings(
                kv_transfer_s=closure.transfer_s,
                kv_exposed_s=event.kv_exposed_s,
                kv_wire_s=closure.wire_s,
            ),
            num_bytes=closure.num_bytes,
            drained=closure.drained,
        )
        if len(run.parts) == self._num_ranks:
            self._close(run)

    def _add_unwritten(self, run: LiveRun, ranks: Iterable[int]) -> None:
        """Speak for ranks that post nothing more and have not said so."""
        error, drained = run.error, not run.undrained
        is_cancel = error is None or isinstance(error, RequestCancelledError)
        for rank in ranks:
            if rank not in run.parts:
                run.parts[rank] = decode_pb2.PartClosure(
                    rank=self._identity.rank + rank,
                    outcome=decode_pb2.TICKET_OUTCOME_ABANDONED
                    if is_cancel and drained
                    else decode_pb2.TICKET_OUTCOME_FAILED,
                    error=error_to_proto(error, run.request_id) if error else None,
                    drained=drained,
                )

    def _close(self, run: LiveRun) -> None:
        run.is_closed, run.closed_at = True, time.monotonic()
        closure = decode_pb2.TicketClosure(
            request_id=run.request_id, nonce=run.nonce, parts=run.parts.values()
        )
        self._closer.close(RankAddress.of(run.reservation), self._identity, closure)

    def _finish(self, run: LiveRun) -> None:
        may_hold_ticket = self._claims.end(run.nonce)
        if may_hold_ticket and not run.is_closed:
            # No sender has heard of it: the claim is on its way, or its answer came too late.
            self._add_unwritten(run, range(self._num_ranks))
            self._close(run)
        if run.undrained:
            self._nonces.set_state(run.nonce, NonceState.UNDRAINED, run.remember_s)
            logger.warning(
                "a ticket ended with writes of unknown state %s", fields(request_id=run.request_id)
            )
        del self._runs[run.nonce]
        run.finished.set()
        self._on_finished(run)
        if not self._runs:
            self._is_empty.set()


def ticket_outcome(event: PartClosed) -> decode_pb2.TicketOutcome:
    """What decode is told of a part."""
    match event.closure.outcome:
        case ClosureOutcome.SENT:
            return decode_pb2.TICKET_OUTCOME_SENT
        case ClosureOutcome.FAILED:
            return decode_pb2.TICKET_OUTCOME_FAILED
        case ClosureOutcome.ABANDONED:
            if event.finish_reason is not None:
                return decode_pb2.TICKET_OUTCOME_NOT_NEEDED
            if isinstance(event.error, RequestCancelledError):
                return decode_pb2.TICKET_OUTCOME_ABANDONED
            # Given up for another reason: decode has to tell the router.
            return decode_pb2.TICKET_OUTCOME_FAILED


def closing_error(event: PartClosed) -> TandemError | None:
    """Why, where the outcome needs a reason."""
    if event.closure.outcome is ClosureOutcome.SENT or event.finish_reason is not None:
        return None
    return event.error or TransferFailedError(event.closure.error or "abandoned")
