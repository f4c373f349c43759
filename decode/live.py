"""Every live request of a rank, and all the ways in which one ends early.

Whatever the state, ending takes the request out of its queue, gives back what it holds (or puts it
into quarantine while a writer may still write), and answers it exactly once: its router by a last
delta, and whoever claims it. Ending what is no longer live does nothing. Used by the engine loop's
thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decode.answers import tell_end, tell_silent_end
from decode.deadlines import overdue
from decode.frames import StepNews
from decode.metrics import DecodeMetrics
from decode.requests import DecodeRequest, RejectedUpdate, Writer
from decode.reservations import Reservations
from decode.scheduler import DecodeScheduler
from decode.tickets import TicketDesk, WriterDemand
from runtime.errors import RequestCancelledError, TandemError
from runtime.sampling import FinishReason
from worker.lifecycle import DecodeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOrder:
    """Something to be asked of the writer of a cancelled ticket."""

    request_id: str
    nonce: int
    writer: Writer
    demand: WriterDemand


EndListener = Callable[[DecodeRequest, FinishReason], None]
"""Hears of a request that is answered, and why it ended."""
_WITHOUT_TICKET = (DecodeStatus.RESERVED, DecodeStatus.CLAIMED)


class LiveRequests:
    """Requests that are not answered yet, by id."""

    def __init__(
        self,
        reservations: Reservations,
        desk: TicketDesk,
        scheduler: DecodeScheduler,
        *,
        news: StepNews,
        metrics: DecodeMetrics,
        order: Callable[[WriterOrder], None],
    ) -> None:
        """`order` takes what has to be asked of writers; it must not block."""
        self._reservations = reservations
        self._desk = desk
        self._scheduler = scheduler
        self._news = news
        self._metrics = metrics
        self._order = order
        self._requests: dict[str, DecodeRequest] = {}
        self._on_forgotten: EndListener = lambda request, reason: None

    def __len__(self) -> int:
        return len(self._requests)

    def on_forgotten(self, listener: EndListener) -> None:
        """Call ``listener`` with each request that is answered, and why it ended; on the loop's
        thread.
        """
        self._on_forgotten = listener

    @property
    def num_tokens_left(self) -> int:
        """Tokens that all of them may still generate, at most."""
        return sum(
            max(0, one.request.sampling.max_tokens - one.request.num_output_tokens)
            for one in self._requests.values()
        )

    def find(self, request_id: str, nonce: int) -> DecodeRequest | None:
        """The request that goes by both names, if it is live."""
        request = self._requests.get(request_id)
        return request if request is not None and request.nonce == nonce else None

    def add(self, request: DecodeRequest) -> None:
        """Take on a request, whose id must be new."""
        assert request.request_id not in self._requests, request.request_id
        self._requests[request.request_id] = request

    def abort(
        self, request_id: str, error: TandemError, *, only_without_ticket: bool = False
    ) -> bool:
        """End a request, in whatever state it is, or only before its ticket; whether it did."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        if only_without_ticket and request.status not in _WITHOUT_TICKET:
            return False
        self.end(request, FinishReason.ABORT, error)
        return True

    def abort_router(self, router_id: str) -> None:
        """End all requests of a router that has no stream any more."""
        for request in list(self._requests.values()):
            if request.router_id == router_id:
                error = RequestCancelledError(f"router {router_id} is gone")
                self.end(request, FinishReason.ABORT, error)

    def give_back(self, error: TandemError) -> None:
        """End what has no KV here, and no ticket either: the router takes it elsewhere."""
        for request in self._reservations.requests:
            self.end(request, FinishReason.ERROR, error.of(request.request_id))

    def fail_all(self, failure_of: Callable[[DecodeRequest], TandemError]) -> None:
        """End every request, each with an error of its own: the rank cannot go on."""
        for request in list(self._requests.values()):
            self.end(request, FinishReason.ERROR, failure_of(request))

    def expire(self, now: float) -> None:
        """End every request that is late."""
        for request in list(self._requests.values()):
            receiving = request.status is DecodeStatus.WAITING_FOR_KV
            ticket = self._desk.ticket_of(request) if receiving else None
            error = overdue(request, ticket, now)
            if error is not None:
                self.end(request, FinishReason.ERROR, error)

    def end(self, request: DecodeRequest, reason: FinishReason, error: TandemError) -> None:
        """End a live request early, wherever it is, and answer it."""
        error.request_id = error.request_id or request.request_id
        if request.status in _WITHOUT_TICKET:
            self._refuse(request, error)
        elif request.status is DecodeStatus.WAITING_FOR_KV:
            self.withdraw(request, revoke=True)
            self._reservations.remember(request.nonce, error)
        else:
            self._scheduler.finish(request)
        self.answer(request, reason, error)

    def _refuse(self, request: DecodeRequest, error: TandemError) -> None:
        """End a request that never got blocks."""
        self._reservations.remove(request)
        self._reservations.remember(request.nonce, error)
        request.move_to(DecodeStatus.FINISHED)
        self._metrics.rejected(error)
        request.tell_claims(RejectedUpdate(error=error))

    def withdraw(self, request: DecodeRequest, *, revoke: bool = False) -> None:
        """End the ticket of a request in WAITING_FOR_KV.

        Args:
            request: becomes FINISHED.
            revoke: whether a writer that is still at it has to be told to stop.
        """
        demand = self._desk.cancel(request)
        request.move_to(DecodeStatus.FINISHED)
        if demand is WriterDemand.FENCE or (demand is WriterDemand.REVOKE and revoke):
            self._order(
                WriterOrder(
                    request_id=request.request_id,
                    nonce=request.nonce,
                    writer=request.writer,
                    demand=demand,
                )
            )

    def answer(self, request: DecodeRequest, reason: FinishReason, error: TandemError) -> None:
        """Say the last word about a request that holds nothing any more."""
        tell_end(self._news, request, reason, error)
        self.forget(request, reason)

    def end_silently(self, request: DecodeRequest, reason: FinishReason) -> None:
        """The request is over, and its router has its only token from elsewhere."""
        tell_silent_end(self._news, request, reason)
        self.forget(request, reason)

    def forget(self, request: DecodeRequest, reason: FinishReason) -> None:
        """The request is answered."""
        del self._requests[request.request_id]
        self._reservations.wake()
        self._metrics.finished(reason)
        self._on_forgotten(request, reason)
