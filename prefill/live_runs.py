"""Calls of Run between their arrival and the last closed part of their ticket.

Lives on the event loop. Turns the engine loop's events into answers, into closures for decode and
into metrics; and keeps the promise to decode: whoever presents a ticket that is new to us, every
rank's part of it is closed, however the request ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from prefill.closer import TicketCloser
from prefill.messages import (
    Event,
    FirstTokenSampled,
    LoopEnded,
    PartClosed,
    RequestFailed,
    RequestFinished,
)
from prefill.metrics import PrefillMetrics
from prefill.nonces import NonceMemory, NonceState
from prefill.peers import peer_of
from prefill.rank_plan import ClosureOutcome
from runtime.errors import (
    InvalidRequestError,
    RequestCancelledError,
    StaleTicketError,
    TandemError,
    TransferFailedError,
)
from runtime.logging import fields, get_logger
from runtime.pb import common_pb2, decode_pb2, prefill_pb2
from runtime.wire import error_to_proto

REMEMBER_MARGIN_S = 60.0
MAX_REMEMBER_S = 3600.0

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRun:
    """One call of Run, or what is left of it.

    Attributes:
        request_id: the router's id.
        ticket: as presented.
        num_prompt_tokens: of the request.
        remember_s: how long its nonce is remembered.
        answer: the first token or an error; cancelled when the caller goes away.
        finished: set when every part is closed and the blocks are released.
        is_queued: the engine loop knows of it.
        revoked: decode took the ticket back before the loop knew of it.
        undrained: a rank cannot say whether its last writes are still on their way.
    """

    request_id: str
    ticket: decode_pb2.TransferTicket
    num_prompt_tokens: int
    remember_s: float
    answer: asyncio.Future[FirstTokenSampled | TandemError]
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    is_queued: bool = False
    revoked: TandemError | None = None
    undrained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """What a CloseTicket call says besides whose it is."""

    outcome: decode_pb2.TicketOutcome
    error: TandemError | None = None
    drained: bool = True
    num_bytes: int = 0
    timings: common_pb2.Timings | None = None


class LiveRuns:
    """All live runs, by nonce."""

    def __init__(
        self,
        identity: common_pb2.WorkerIdentity,
        num_ranks: int,
        *,
        nonces: NonceMemory,
        closer: TicketCloser,
        metrics: PrefillMetrics,
        forget_peer: Callable[[str], None],
    ) -> None:
        """Start empty.

        Args:
            identity: ours; of rank 0 where several ranks write parts.
            num_ranks: parts of every ticket.
            nonces: tickets that were seen.
            closer: tells decode.
            metrics: of the worker.
            forget_peer: called with the transport's name of a decode rank that was not reached.
        """
        self._identity = identity
        self._num_ranks = num_ranks
        self._nonces = nonces
        self._closer = closer
        self._metrics = metrics
        self._forget_peer = forget_peer
        self._runs: dict[int, LiveRun] = {}
        self._is_closed = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.loop_ended: asyncio.Future[LoopEnded] = asyncio.get_running_loop().create_future()
        """Done when the engine loop is over, with its last event."""

    def __len__(self) -> int:
        return len(self._runs)

    def claim(self, request: prefill_pb2.RunRequest) -> LiveRun:
        """Take on a call and use up its ticket.

        Raises:
            InvalidRequestError: there is no ticket.
            StaleTicketError: the ticket was used before, or revoked.
        """
        ticket = request.ticket
        if ticket.nonce == 0:
            raise InvalidRequestError("the call has no ticket: reserve at a decode worker first")
        remember_s = max(request.timeout_s, ticket.timeout_s, 0.0) + REMEMBER_MARGIN_S
        remember_s = min(remember_s, MAX_REMEMBER_S)
        state = self._nonces.use(ticket.nonce, remember_s)
        if state is not None:
            word = "revoked" if state is NonceState.REVOKED else "used already"
            raise StaleTicketError(f"the ticket {ticket.nonce:016x} was {word}: reserve again")
        run = LiveRun(
            request_id=request.request_id,
            ticket=ticket,
            num_prompt_tokens=len(request.prompt_token_ids),
            remember_s=remember_s,
            answer=asyncio.get_running_loop().create_future(),
        )
        self._runs[ticket.nonce] = run
        self._is_empty.clear()
        return run

    def get(self, nonce: int) -> LiveRun | None:
        """The live run under a nonce."""
        return self._runs.get(nonce)

    def refuse(self, run: LiveRun, error: TandemError, *, drained: bool = True) -> None:
        """End a run that the engine loop never heard of, and close every part of its ticket.

        Args:
            run: not queued.
            error: why; a cancelled call abandons the ticket, anything else fails it.
            drained: False where an earlier life of this worker may have written.
        """
        assert not run.is_queued
        if self._is_closed:
            return
        is_cancel = isinstance(error, RequestCancelledError)
        outcome = (
            decode_pb2.TICKET_OUTCOME_ABANDONED if is_cancel else decode_pb2.TICKET_OUTCOME_FAILED
        )
        for rank in range(self._num_ranks):
            self._close(run, rank, _Ending(outcome=outcome, error=error, drained=drained))
        run.undrained = not drained
        self._metrics.request_ended(error)
        self._finish(run)

    def handle(self, event: Event) -> None:
        """Take one event of the engine loop."""
        if isinstance(event, LoopEnded):
            self._end(event)
            return
        run = self._runs.get(event.nonce)
        if run is None:
            assert self._is_closed, event
            return  # `close_left` has ended it
        match event:
            case FirstTokenSampled():
                self._answer(run, event)
                self._metrics.first_token(event, run.num_prompt_tokens)
            case RequestFailed(_, error):
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

    def close_left(self, rank: int, error: TandemError) -> None:
        """After the engine loop's end: close one rank's part of what is left.

        Only for a rank whose sender is closed, so that nothing of it can be in flight.
        """
        self._is_closed = True
        for run in list(self._runs.values()):
            run.undrained |= self._num_ranks > 1  # nobody can speak for the other ranks
            outcome = decode_pb2.TICKET_OUTCOME_FAILED
            self._close(run, rank, _Ending(outcome=outcome, error=error))
            self._finish(run)

    def _end(self, event: LoopEnded) -> None:
        # Those, too, that were handed over before the end and that the loop had not come to.
        for run in self._runs.values():
            self._answer(run, event.failure)
        if not self.loop_ended.done():
            self.loop_ended.set_result(event)

    def _answer(self, run: LiveRun, answer: FirstTokenSampled | TandemError) -> None:
        if not run.answer.done():
            run.answer.set_result(answer)

    def _part_closed(self, run: LiveRun, event: PartClosed) -> None:
        closure = event.closure
        if closure.outcome is ClosureOutcome.FAILED:
            self._forget_peer(peer_of(run.ticket.decode))
            run.undrained |= not closure.drained
        timings = common_pb2.Timings(
            kv_transfer_s=closure.transfer_s, kv_exposed_s=event.kv_exposed_s
        )
        outcome = ticket_outcome(event)
        decode = run.ticket.decode
        self._metrics.part_closed(event, outcome, f"{decode.instance}/{decode.rank}")
        self._close(
            run,
            event.rank,
            _Ending(
                outcome=outcome,
                error=closing_error(event),
                drained=closure.drained,
                num_bytes=closure.num_bytes,
                timings=timings,
            ),
        )

    def _close(self, run: LiveRun, rank: int, ending: _Ending) -> None:
        identity = common_pb2.WorkerIdentity(
            instance=self._identity.instance,
            epoch=self._identity.epoch,
            rank=self._identity.rank + rank,
        )
        error = error_to_proto(ending.error, run.request_id) if ending.error else None
        self._closer.close(
            run.ticket.decode_address,
            decode_pb2.CloseTicketRequest(
                request_id=run.request_id,
                nonce=run.ticket.nonce,
                decode_epoch=run.ticket.decode.epoch,
                prefill=identity,
                outcome=ending.outcome,
                error=error,
                timings=ending.timings,
                num_bytes=ending.num_bytes,
                drained=ending.drained,
            ),
        )

    def _finish(self, run: LiveRun) -> None:
        if run.undrained:
            self._nonces.set_state(run.ticket.nonce, NonceState.UNDRAINED, run.remember_s)
            logger.warning(
                "a ticket ended with writes of unknown state %s", fields(request_id=run.request_id)
            )
        del self._runs[run.ticket.nonce]
        run.finished.set()
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
