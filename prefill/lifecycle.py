"""Where requests come into the engine loop and where they leave it, one way or another.

A request ends by its first token, by a cancel, by its deadline, by a claim that decode refuses, or
by a rank that cannot send. In every case the same is due: somebody is told, nothing more is
computed, and the blocks stay until every rank has closed the ticket and every step that was
launched with it is over. A request that no sender has heard of yet is over at once. This is the
only place that knows these rules. Belongs to the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine.pending_step import StepResult
from kv_transfer.metadata import NO_DRAFT, MetadataRecord
from prefill.commands import OpenTicket
from prefill.messages import (
    Event,
    FirstTokenSampled,
    LoopEnded,
    PartClosed,
    RequestFailed,
    RequestFinished,
    TicketWanted,
)
from prefill.rank_plan import Closure, ClosureOutcome
from prefill.request import Chunk, Grant, PrefillRequest
from prefill.scheduler import Scheduler
from prefill.sender_group import SenderGroup
from runtime.errors import (
    ERRORS_BY_CODE,
    ErrorCode,
    InternalError,
    TandemError,
)
from runtime.logging import fields, get_logger
from worker.lifecycle import PrefillStatus

logger = get_logger(__name__)

_PHASES: Mapping[PrefillStatus, str] = {
    PrefillStatus.WAITING: "queued for prefill",
    PrefillStatus.CLAIMING: "waiting for room in decode",
    PrefillStatus.RUNNING: "in prefill",
}
"""What a request whose time is over was waiting for."""


class RequestLifecycle:
    """All requests of the loop, by their nonce."""

    def __init__(
        self,
        scheduler: Scheduler,
        senders: SenderGroup,
        emit: Callable[[Event], None],
        *,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._senders = senders
        self._emit = emit
        self._max_model_len = max_model_len
        self._clock = clock
        self._items: dict[int, PrefillRequest] = {}  # by nonce

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: PrefillRequest) -> None:
        """Queue a request; one that can never fit is answered at once."""
        try:
            self._scheduler.add(item)
        except TandemError as error:
            item.error = error
            item.move_to(PrefillStatus.FINISHED)
            self._emit(RequestFailed(item.nonce, error))
            self._emit(RequestFinished(item.nonce))
            return
        self._items[item.nonce] = item

    def cancel(self, nonce: int, error: TandemError) -> None:
        """End a request in whatever state it is; one that is over is no error."""
        if nonce in self._items:
            self._end_early(self._items[nonce], error)

    def want_tickets(self) -> None:
        """Have decode asked for room for those whose turn is near."""
        for item in self._scheduler.claim(self._clock()):
            self._emit(TicketWanted(item.nonce))

    def ticket_claimed(self, nonce: int, grant: Grant) -> None:
        """Decode has room: compute the request in its turn. Nobody opens what came too late."""
        item = self._items.get(nonce)
        if item is not None and item.status is PrefillStatus.CLAIMING:
            self._scheduler.grant(item, grant)

    def claim_failed(self, nonce: int, error: TandemError) -> None:
        """Decode gave no ticket: the request ends."""
        item = self._items.get(nonce)
        if item is not None and item.status is PrefillStatus.CLAIMING:
            self._end_early(item, error)

    def give_back(self, error: TandemError, *, also_begun: bool) -> None:
        """End what has no ticket, and with `also_begun` what has no first token, for the router."""
        scheduler = self._scheduler
        for item in list(scheduler.unfinished() if also_begun else scheduler.unbegun()):
            self._end_early(item, error.of(item.request_id))

    def expire(self) -> None:
        """End the requests whose time is over before their first token."""
        now = self._clock()
        late = [item for item in self._scheduler.unfinished() if item.budget.is_over(now)]
        for item in late:
            self._end_early(item, item.budget.error(_PHASES[item.status], item.request_id))

    def open_tickets(self, chunks: Sequence[Chunk]) -> None:
        """Open the tickets of the requests that start with this step, on every rank."""
        now = self._clock()
        for chunk in chunks:
            item = chunk.item
            if item.started_at == 0.0:
                item.started_at = now
                self._senders.open(OpenTicket(item.granted.ticket, item.granted.peer))

    def answer(self, item: PrefillRequest, result: StepResult, seconds: float) -> None:
        """The first token is known; its step, which has taken so long until now, may go on."""
        sampled = result.sampled
        assert sampled is not None
        item.first_token_at = self._clock()
        index = item.request.num_output_tokens
        item.request.output_token_ids.append(sampled.token_id)
        item.finish_reason = item.request.finish_reason(self._max_model_len)
        matcher = item.request.matcher
        self._emit(
            FirstTokenSampled(
                nonce=item.nonce,
                token_id=sampled.token_id,
                index=index,
                logprobs=sampled.logprobs,
                prompt_logprobs=(*item.prompt_logprobs, *result.prompt_logprobs),
                finish_reason=item.finish_reason,
                num_cached_tokens=item.request.num_cached_tokens,
                queue_s=item.started_at - item.arrived_at,
                compute_s=item.compute_s + seconds,
                mask_cpu_s=0.0 if matcher is None else matcher.cpu_s,
            )
        )

    def complete(self, item: PrefillRequest, result: StepResult, seconds: float) -> None:
        """Its step is over: answer if nobody has; then the senders finish, or stop if it ends."""
        sampled = result.sampled
        assert sampled is not None
        if item.first_token_at == 0.0:
            self.answer(item, result, seconds)
        self._scheduler.stop(item)
        if item.finish_reason is not None:
            self._senders.abandon(item.nonce)
            return
        record = MetadataRecord(
            nonce=item.nonce,
            epoch=item.granted.ticket.epoch,
            first_token=sampled.token_id,
            logprobs=sampled.logprobs,
            first_draft=NO_DRAFT if result.draft is None else result.draft,
        )
        self._senders.finish(item.nonce, record)

    def fail(self, item: PrefillRequest, error: TandemError) -> None:
        """A step gave nothing for it: it ends, and what was computed of it is not sent.

        Nor may its KV answer a later prompt: it may be what the logits' numbers were lost in.
        """
        self._scheduler.pool.forget(item.request.block_table)
        self._end_early(item, error)

    def rank_closed(self, rank: int, closure: Closure) -> None:
        """A rank will not read the request's blocks any more; the last one releases them."""
        item = self._items.get(closure.nonce)
        if item is None or rank in item.closed_ranks:
            raise InternalError(f"rank {rank} closed ticket {closure.nonce:016x} out of turn")
        item.closed_ranks.add(rank)
        if closure.outcome is ClosureOutcome.FAILED:
            self._end_early(item, _error_of(item, rank, closure))
        self._emit_part(item, rank, closure)
        self.settle(item)

    def settle(self, item: PrefillRequest) -> None:
        """Let go of a request that every rank has closed, unless a launched step still has it."""
        is_closed = len(item.closed_ranks) == self._senders.num_ranks
        if is_closed and not item.request.num_launched_tokens:
            self._finish(item)

    def fail_all(self, ended: LoopEnded) -> None:
        """The loop is over: answer all who still wait for a first token."""
        for item in self._items.values():
            if item.first_token_at == 0.0 and item.error is None:
                failure = ended.failure_of(in_step=item.request.is_in_step)
                self._emit(RequestFailed(item.nonce, failure.of(item.request_id)))

    def _end_early(self, item: PrefillRequest, error: TandemError) -> None:
        """Compute and send no more of it; what a sender has in flight is waited for."""
        if item.error is not None or item.finish_reason is not None:
            return
        item.error = error
        if item.status in (PrefillStatus.WAITING, PrefillStatus.CLAIMING):
            self._emit(RequestFailed(item.nonce, error))
            self._scheduler.drop(item)
            self._forget(item)
            return
        if item.status is PrefillStatus.RUNNING:
            self._scheduler.stop(item)
            self._emit(RequestFailed(item.nonce, error))
        if item.started_at == 0.0:
            self._finish(item)  # no sender has heard of its ticket
        else:
            self._senders.abandon(item.nonce)

    def _finish(self, item: PrefillRequest) -> None:
        self._scheduler.finish(item)
        self._forget(item)

    def _forget(self, item: PrefillRequest) -> None:
        del self._items[item.nonce]
        self._emit(RequestFinished(item.nonce))

    def _emit_part(self, item: PrefillRequest, rank: int, closure: Closure) -> None:
        exposed = 0.0
        if item.first_token_at and closure.finished_at:
            exposed = max(closure.finished_at - item.first_token_at, 0.0)
        self._emit(
            PartClosed(
                nonce=item.nonce,
                rank=rank,
                closure=closure,
                finish_reason=item.finish_reason,
                error=item.error,
                kv_exposed_s=exposed,
            )
        )


def _error_of(item: PrefillRequest, rank: int, closure: Closure) -> TandemError:
    """Why rank `rank` could not send its part."""
    code = closure.error_code
    if code in (None, ErrorCode.INTERNAL):
        # Whatever broke in the sender, only the KV did not arrive: another pair may do better.
        code = ErrorCode.TRANSFER_FAILED
    peer = item.granted.peer.peer
    text = f"prefill rank {rank} could not send its KV to {peer}: {closure.error}"
    logger.warning("%s %s", text, fields(request_id=item.request_id))
    return ERRORS_BY_CODE[code](text, request_id=item.request_id)
