"""One decode rank: conducts reservations, tickets and scheduler, and writes the routers' news.

It decides nothing that one of those parts can decide; it moves requests between them, and sees to
it that every request ends in exactly one last delta (a silent one where its first token, which the
router has, ended it). Every method is called on the engine loop's thread, and none blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from decode.admission import GrowthEstimator
from decode.answers import tell_tokens
from decode.frames import StepNews
from decode.guard import before_changes
from decode.hand_over import HandOver
from decode.live import LiveRequests, WriterOrder
from decode.metrics import DecodeMetrics
from decode.requests import Claim, DecodeRequest
from decode.reservations import RankLimits, Reservations
from decode.scheduler import DecodeScheduler, StepPlan
from decode.tickets import TicketDesk
from engine.memory.block_pool import BlockPool
from engine.sampling.inputs import SampledToken
from engine.step_error import StepError
from grammar.constraints import AnyMatcher
from runtime.errors import (
    InternalError,
    OutOfBlocksError,
    TandemError,
    TransferFailedError,
)
from runtime.logging import fields, get_logger
from runtime.pb import registry_pb2
from runtime.sampling import FinishReason
from worker.lifecycle import DecodeStatus

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
        self.pool = self._pool = pool
        self._scheduler = scheduler
        self._growth = GrowthEstimator(pool.block_size, limits.max_model_len)
        self._reservations = Reservations(pool, desk, self._growth, limits, clock)
        self._metrics = metrics
        self._clock = clock
        self.live = LiveRequests(
            self._reservations, desk, scheduler, news=self.news, metrics=metrics, order=order
        )
        self.hand_over = HandOver(
            pool,
            desk,
            self.live,
            scheduler=scheduler,
            reservations=self._reservations,
            metrics=metrics,
            limits=limits,
            clock=clock,
        )
        self._next_expiry = 0.0
        self._drain: tuple[float, TandemError] | None = None
        self._num_reports = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left, neither a request nor a block in quarantine or in a step."""
        is_unused = self.desk.num_quarantined == 0 and not self._scheduler.lingering
        return not self.live and is_unused

    def reserve(self, request: DecodeRequest) -> None:
        """Take a request on, whose id is not in use."""
        with before_changes("Reserve"):
            self.live.add(request)
        self._reservations.add(request)
        if self._drain is not None:
            self.live.end(request, FinishReason.ERROR, self._drain[1].of(request.request_id))

    def claim(self, claim: Claim) -> None:
        """A writer asks for a ticket, and is told it as soon as there are blocks.

        Raises:
            TandemError: it will not be: see `Reservations.claim`.
        """
        with before_changes("Claim"):
            self._reservations.check(claim)
        self._reservations.claim(claim)
        self._admit()

    def matched(self, request: DecodeRequest, making: Future[AnyMatcher | None]) -> None:
        """The grammar of a request is compiled, or cannot be; it may be over by now."""
        error = making.exception()
        if error is None:
            request.request.matcher = making.result()
        elif self.live.find(request.request_id, request.nonce) is request:
            failure = error if isinstance(error, TandemError) else InternalError(repr(error))
            self.live.end(request, FinishReason.ERROR, failure.of(request.request_id))

    def unclaim(self, claim: Claim) -> None:
        """The call was cancelled, and may not have been answered."""
        request = self._reservations.unclaim(claim)
        if request is not None:
            error = TransferFailedError(
                f"{request.writer.instance} cancelled the claim of its ticket before it had it"
            )
            self.live.end(request, FinishReason.ERROR, error)

    def renew(self, nonces: Sequence[int], writer_key: str) -> list[int]:
        """Prompts of these tickets are still being computed; those that nothing waits for."""
        return self._reservations.renew(nonces, writer_key)

    def start_drain(self, deadline_s: float, error: TandemError) -> None:
        """Give back at once what holds nothing, and all the rest when the time is over.

        Args:
            deadline_s: from now; the earliest deadline counts.
            error: what they are told.
        """
        until = self._clock() + deadline_s
        if self._drain is None or until < self._drain[0]:
            self._drain = (until, error)
            self._next_expiry = 0.0
        self.live.give_back(error)

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
            if (drain := self._drain) is not None and now >= drain[0]:
                self.live.fail_all(lambda one: drain[1].of(one.request_id))
        _end_late(self)
        self._admit()
        if self._scheduler.must_wait:
            assert complete_launched is not None
            complete_launched()
        plan = self._scheduler.schedule()
        for request in plan.started:
            request.started_at = self._clock()
            request.timings.decode_admission_s = request.started_at - request.arrived_at
            self._metrics.started(request.timings)
        for request in plan.preempted:
            logger.info("preempted %s", fields(request_id=request.request_id))
        for request in plan.failed:
            self.live.answer(request, FinishReason.ERROR, self._cannot_grow(request))
        self._metrics.scheduled(len(plan.preempted), len(plan.resumed))
        return plan

    def complete_step(
        self,
        plan: StepPlan,
        sampled: Sequence[Sequence[SampledToken]],
        verified: Sequence[int] = (),
    ) -> int:
        """Book the tokens of each request, one or with drafts more; how many there were.

        `verified`: drafts of each that the step verified; empty for a step without.

        A request that ended since the step was planned gets none, and one that ends gets none
        behind that: nobody hears of those tokens. One without any has no usable logits, or nothing
        that its constraint allows, and fails alone; unless its row was lost: it runs that again.
        """
        num_tokens = 0
        verified = verified or [0] * len(sampled)
        shares = zip(plan.requests, plan.scheduled, sampled, verified, strict=True)
        for request, share, tokens, num_drafts in shares:
            if not self._scheduler.land(request) or share.is_lost:
                continue
            if not tokens:
                # Its KV may be what the numbers were lost in: no later prompt may find it.
                self._pool.forget(request.request.block_table)
                self.live.end(request, FinishReason.ERROR, request.request.failure)
                continue
            given, reason = self._append(request, tokens)
            num_tokens += len(given)
            self._metrics.drafts.verified(num_drafts, len(given) - 1)
            if reason is None:
                tell_tokens(self.news, request, given, None, num_drafts)
            else:
                _finish(self, request, given, reason, num_drafts)
        return num_tokens

    def _append(
        self, request: DecodeRequest, tokens: Sequence[SampledToken]
    ) -> tuple[Sequence[SampledToken], FinishReason | None]:
        """Book tokens up to the one that ends the request: these, and why it ends, if it does."""
        for count, token in enumerate(tokens, 1):
            reason = self._scheduler.append_token(request, token.token_id)
            if reason is not None:
                return tokens[:count], reason
        return tokens, None

    def give_up_step(self, plan: StepPlan, error: StepError) -> None:
        """A step gave nothing: end the requests that it ends, and run the others again."""
        for request in plan.requests:
            if self._scheduler.land(request) and error.ends(request.request_id):
                self.live.end(request, FinishReason.ERROR, error.answer(request.request_id))

    def stepped(self, num_requests: int, seconds: float, max_drafts: int = 0) -> None:
        """A step of so many requests took so long; it had room for so many drafts of each."""
        self._scheduler.steps.observe(num_requests, seconds)
        self._metrics.drafts.stepped(max_drafts)

    def load(self) -> registry_pb2.WorkerLoad:
        """What the router should know of us; also mirrored into the metrics."""
        self._num_reports += 1
        report = registry_pb2.WorkerLoad(
            num_requests_running=len(self._scheduler.running),
            num_requests_waiting=len(self.live) - len(self._scheduler.running),
            num_free_blocks=self._pool.num_free_blocks,
            num_total_blocks=self._pool.num_usable_blocks,
            num_quarantined_blocks=self.desk.num_quarantined_blocks,
            num_requests_blocked=self._reservations.num_claimed + len(self._scheduler.preempted),
            sequence=self._num_reports,
        )
        self._metrics.set_load(self.counts(), report)
        self._metrics.set_offloaded(self._scheduler.num_offloaded_blocks)
        self._metrics.transfers.set_quarantined(self.desk.quarantined_blocks())
        return report

    def counts(self) -> dict[DecodeStatus, int]:
        """Live requests by status."""
        return {
            DecodeStatus.RESERVED: self._reservations.num_reserved,
            DecodeStatus.CLAIMED: self._reservations.num_claimed,
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
        if not self._reservations.num_claimed:
            return
        holders = [*self.desk.requests, *self._scheduler.requests]
        for request, error in self._reservations.admit(holders, away=self._scheduler.away):
            failure = InternalError(f"no ticket can be issued: {type(error).__name__}: {error}")
            self.live.end(request, FinishReason.ERROR, failure)

    def _cannot_grow(self, request: DecodeRequest) -> TandemError:
        return OutOfBlocksError(
            f"after {request.request.num_tokens} tokens no KV block is left for the next, in the "
            f"pool ({self._pool.num_usable_blocks} blocks, decode.num_blocks) or in host memory "
            "(decode.preemption_host_blocks)"
        )


def _end_late(rank: DecodeRank) -> None:
    """End what was found to be over, or not to go on, after its last token was told."""
    for request in tuple(rank._scheduler.running):
        inner = request.request
        matcher = inner.matcher
        if matcher is None or matcher.is_binding or inner.num_launched_tokens:
            continue
        if matcher.error is not None:
            error = matcher.error.of(request.request_id)
            rank.live.end(request, FinishReason.ERROR, error)
        elif matcher.is_over:
            _finish(rank, request, (), FinishReason.COMPLETE)


def _finish(
    rank: DecodeRank,
    request: DecodeRequest,
    tokens: Sequence[SampledToken],
    reason: FinishReason,
    num_drafts: int = 0,
) -> None:
    """Tell the last tokens of a request that is over."""
    tell_tokens(rank.news, request, tokens, reason, num_drafts)
    rank._growth.observe(request.request.num_output_tokens, request.request.sampling)
    rank._metrics.decoded(rank._clock() - request.started_at)
    rank._scheduler.finish(request)
    rank.live.forget(request, reason)
