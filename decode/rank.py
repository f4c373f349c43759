"""One decode rank: conducts reservations, tickets and scheduler, and writes the routers' news.

It decides nothing that one of those parts can decide; it moves requests between them, and sees to
it that every request ends in exactly one answer: a rejection of its Reserve while it is RESERVED, a
last delta afterwards (none where its first token, which the router has, ended it). Every method is
called on the engine loop's thread, and none blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decode.admission import GrowthEstimator
from decode.answers import tell_token
from decode.frames import StepNews
from decode.live import LiveRequests, WriterOrder
from decode.metrics import DecodeMetrics
from decode.requests import DecodeRequest
from decode.reservations import RankLimits, Reservations
from decode.scheduler import DecodeScheduler, StepPlan
from decode.tickets import Ticket, TicketDesk
from engine.memory.block_pool import BlockPool
from engine.sampling.inputs import SampledToken
from kv_transfer.receiver import Arrival
from runtime.errors import (
    InternalError,
    OutOfBlocksError,
    StaleTicketError,
    TandemError,
    TransferFailedError,
)
from runtime.lifecycle import DecodeStatus
from runtime.logging import fields, get_logger
from runtime.pb import common_pb2, decode_pb2
from runtime.sampling import FinishReason, finish_reason_after

logger = get_logger(__name__)

EXPIRY_INTERVAL_S = 0.05


class DecodeRank:
    """All requests of one rank."""

    def __init__(
        self,
        pool: BlockPool,
        desk: TicketDesk,
        scheduler: DecodeScheduler,
        *,
        limits: RankLimits,
        metrics: DecodeMetrics,
        clock: Callable[[], float],
        order: Callable[[WriterOrder], None],
    ) -> None:
        """`order` takes what has to be asked of writers; it must not block."""
        self.desk = desk
        self.news = StepNews()
        self._pool = pool
        self._scheduler = scheduler
        self._growth = GrowthEstimator(pool.block_size, limits.max_model_len)
        self._reservations = Reservations(pool, desk, self._growth, limits, clock)
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self.live = LiveRequests(
            self._reservations, desk, scheduler, news=self.news, metrics=metrics, order=order
        )
        self._next_expiry = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left, neither a request nor a block in quarantine or in a step."""
        is_unused = self.desk.num_quarantined == 0 and not self._scheduler.lingering
        return not self.live and is_unused

    def reserve(self, request: DecodeRequest) -> None:
        """Take a request on: queue it and let it in if it fits, or reject it at once."""
        error = self._reservations.refusal(request, self.live.request_ids)
        if error is not None:
            self.live.reject(request, error)
            return
        self.live.add(request)
        self._reservations.add(request)
        self._admit()

    def arrived(self, arrival: Arrival) -> None:
        """The KV of an allocation is complete: its request can run."""
        request = self.desk.arrive(arrival.nonce)
        self._reservations.wake()
        if request is None:
            return
        request.arrived_at = self._clock()
        inner = request.request
        self._metrics.kv_arrived(arrival.waited_s, inner.num_prompt_tokens, inner.num_cached_tokens)
        self._metrics.transfers.arrived(request.writer.instance, arrival.waited_s)
        if arrival.record is not None:
            self._start_waiting(request, arrival.record.first_token)
            return
        self._discard(request)
        error = arrival.error or TransferFailedError("the metadata record is unreadable")
        self.live.answer(request, FinishReason.ERROR, error)

    def close_ticket(self, message: decode_pb2.CloseTicketRequest, failure: TandemError) -> None:
        """A part of a writer closes its ticket.

        Args:
            message: nonce, rank, outcome.
            failure: what the request ends with, if the outcome ends it.

        Raises:
            StaleTicketError: the nonce is not ours, or long forgotten.
        """
        rank = message.prefill.rank
        failed = message.outcome == decode_pb2.TICKET_OUTCOME_FAILED
        ticket = self.desk.close_part(message.nonce, rank, drained=message.drained or not failed)
        if ticket is None:
            raise StaleTicketError(
                f"no ticket with nonce {message.nonce:#x} of prefill rank {rank} is known here",
                request_id=message.request_id,
            )
        self._reservations.wake()
        _merge_timings(ticket.request.timings, message.timings)
        self._metrics.kv_received(message.num_bytes)
        self._metrics.transfers.part_closed(message)
        if self.desk.is_open(ticket):
            self._react_to_closing(ticket, message.outcome, failure)

    def drained(self, nonce: int) -> None:
        """The writer will never write under this nonce (again)."""
        self.desk.drained(nonce)
        self._reservations.wake()

    def fenced(self, nonces: Sequence[int]) -> None:
        """The writer of these tickets was shut out."""
        self.desk.fenced(nonces)
        self._metrics.fenced()
        self._reservations.wake()

    def plan_step(self, complete_launched: Callable[[], None] | None = None) -> StepPlan:
        """Expire what is late, let in what fits, and decide the step.

        Args:
            complete_launched: completes all steps that were launched and not completed, which the
                decision may have to wait for; None if there are none.
        """
        now = self._clock()
        if now >= self._next_expiry:
            self._next_expiry = now + EXPIRY_INTERVAL_S
            self.live.expire(now)
        self._admit()
        if self._scheduler.must_wait:
            assert complete_launched is not None
            complete_launched()
        plan = self._scheduler.schedule()
        for request in plan.started:
            request.timings.decode_admission_s = self._clock() - request.arrived_at
            self._metrics.started(request.timings)
        for request in plan.preempted:
            logger.info("preempted %s", fields(request_id=request.request_id))
        for request in plan.failed:
            self.live.answer(request, FinishReason.ERROR, self._cannot_grow(request))
        self._metrics.scheduled(len(plan.preempted), len(plan.resumed))
        return plan

    def complete_step(self, plan: StepPlan, sampled: Sequence[SampledToken | None]) -> int:
        """Book one token a request; how many there were.

        A request that ended since the step was planned gets none: nobody hears of that token. One
        with None has no usable logits, and fails alone.
        """
        num_tokens = 0
        for request, token in zip(plan.requests, sampled, strict=True):
            if not self._scheduler.land(request):
                continue
            if token is None:
                # Its KV may be what the numbers were lost in: no later prompt may find it.
                self._pool.forget(request.request.block_table)
                error = InternalError("the model's logits are not finite")
                self.live.end(request, FinishReason.ERROR, error)
                continue
            num_tokens += 1
            reason = self._scheduler.append_token(request, token.token_id)
            tell_token(self.news, request, token, reason)
            if reason is not None:
                self._growth.observe(request.request.num_output_tokens, request.request.sampling)
                self._scheduler.finish(request)
                self.live.forget(request, reason)
        return num_tokens

    def load(self) -> decode_pb2.LoadReport:
        """What the router should know of us; also mirrored into the metrics."""
        report = decode_pb2.LoadReport(
            num_requests_running=len(self._scheduler.running),
            num_requests_waiting=len(self.live) - len(self._scheduler.running),
            num_free_blocks=self._pool.num_free_blocks,
            num_total_blocks=self._pool.num_usable_blocks,
            num_quarantined_blocks=self.desk.num_quarantined_blocks,
        )
        self._metrics.set_load(self.counts(), report)
        self._metrics.set_offloaded(self._scheduler.num_offloaded_blocks)
        self._metrics.transfers.set_quarantined(self.desk.quarantined_blocks())
        return report

    def counts(self) -> dict[DecodeStatus, int]:
        """Live requests by status."""
        return {
            DecodeStatus.RESERVED: len(self._reservations),
            DecodeStatus.WAITING_FOR_KV: self.desk.num_open,
            DecodeStatus.WAITING: len(self._scheduler.waiting),
            DecodeStatus.RUNNING: len(self._scheduler.running),
            DecodeStatus.OFFLOADING: len(self._scheduler.offloading),
            DecodeStatus.PREEMPTED: len(self._scheduler.preempted),
        }

    def check_integrity(self) -> None:
        """Raise InternalError unless the books agree and an empty rank holds no block."""
        self._pool.check_integrity()
        self._scheduler.check_integrity()
        self.desk.check_integrity()
        if sum(self.counts().values()) != len(self.live):
            raise InternalError(f"{len(self.live)} live requests, in queues: {self.counts()}")
        num_held = self._pool.num_usable_blocks - self._pool.num_free_blocks
        if self.is_empty and num_held:
            raise InternalError(f"{num_held} KV blocks are held and no request is left")

    def _admit(self) -> None:
        if len(self._reservations):
            holders = [*self.desk.requests, *self._scheduler.requests]
            self._reservations.admit(holders, is_open=not self._scheduler.is_short)

    def _start_waiting(self, request: DecodeRequest, first_token: int) -> None:
        inner = request.request
        inner.num_computed_tokens = inner.num_prompt_tokens
        inner.output_token_ids.append(first_token)
        num_whole = inner.num_prompt_tokens // self._pool.block_size
        self._pool.commit(inner.block_table[:num_whole], inner.block_hashes[:num_whole])
        reason = finish_reason_after(
            first_token,
            num_output_tokens=1,
            num_tokens=inner.num_tokens,
            params=inner.sampling,
            max_model_len=self._limits.max_model_len,
        )
        if reason is not None:
            self._discard(request)
            self.live.forget(request, reason)
            return
        request.move_to(DecodeStatus.WAITING)
        self._scheduler.add(request)

    def _react_to_closing(
        self, ticket: Ticket, outcome: decode_pb2.TicketOutcome, failure: TandemError
    ) -> None:
        request = ticket.request
        if outcome == decode_pb2.TICKET_OUTCOME_SENT:
            if ticket.is_over:
                ticket.all_sent_at = ticket.all_sent_at or self._clock()
        elif outcome == decode_pb2.TICKET_OUTCOME_NOT_NEEDED:
            # The router has the only token.
            self.live.withdraw(request)
            self.live.forget(request, FinishReason.STOP)
        elif outcome == decode_pb2.TICKET_OUTCOME_ABANDONED:
            self.live.end(request, FinishReason.ABORT, failure)
        else:
            self.live.end(request, FinishReason.ERROR, failure)

    def _discard(self, request: DecodeRequest) -> None:
        """Release the blocks of a request whose KV has arrived but which will not run."""
        block_ids, request.request.block_table = request.request.block_table, []
        self._pool.release(block_ids)
        request.move_to(DecodeStatus.FINISHED)

    def _cannot_grow(self, request: DecodeRequest) -> TandemError:
        return OutOfBlocksError(
            f"after {request.request.num_tokens} tokens no KV block is left for the next, in the "
            f"pool ({self._pool.num_usable_blocks} blocks, decode.num_blocks) or in host memory "
            "(decode.preemption_host_blocks)"
        )


def _merge_timings(timings: common_pb2.Timings, of_part: common_pb2.Timings) -> None:
    """The slowest part counts."""
    timings.kv_transfer_s = max(timings.kv_transfer_s, of_part.kv_transfer_s)
    timings.kv_exposed_s = max(timings.kv_exposed_s, of_part.kv_exposed_s)
