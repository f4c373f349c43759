"""What a prefill rank does in its engine loop (`worker.step_loop`): chunks, pushes, followers.

Chunks depend on nothing that a step finds out, so the next ones are scheduled while a step runs.
What a step finds out is booked as soon as it is over, in the order of the launches, also in the
middle of the next one's: computed tokens become findable, requests whose prompt is complete get
their first token, requests that ended meanwhile let go of their blocks. None of these requests that
ends is in the step that is being launched: only the last chunk of a prompt samples.

The asyncio side and the sender's threads say commands, and hear events. Followers, if there are
any, are told of every step, and hear something now and then when there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.batch import ForwardBatch
from engine.experts.votes import ExpertTurns, StandingExperts
from engine.parallel.lockstep import Lockstep, SoloLockstep
from engine.pending_step import PendingStep, StepResult
from engine.runner import ModelRunner
from engine.step_error import StepError
from prefill.commands import PushBlocks
from prefill.kv_push import PushSettings, StepPusher, plan_pushes
from prefill.lifecycle import RequestLifecycle
from prefill.messages import (
    AddRequest,
    CancelRequest,
    ClaimFailed,
    Command,
    Event,
    GiveBack,
    LoopEnded,
    LoopLoad,
    RankClosed,
    StopLoop,
    TicketClaimed,
)
from prefill.request import Chunk
from prefill.scheduler import Scheduler
from prefill.sender_group import SenderGroup
from prefill.stall import StallMeter
from runtime.errors import TandemError
from worker.endings import RankName
from worker.lifecycle import PrefillStatus
from worker.step_driver import LoopOptions
from worker.step_loop import StepLoop
from worker.watchdog import WatchdogOptions

AHEAD_POLL_S = 0.0005
"""While the last step runs and nothing else can: so often it is looked at, between commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What does not change while the loop runs; times in seconds.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        push: how layers are grouped for sending.
        idle_s: how often a loop that can run nothing looks at deadlines.
        heartbeat_s: followers hear of us at least so often.
        closure_poll_s: how often followers that owe closures are asked.
        name, max_ahead, enter_thread, launched, experts, step_limit_s, watchdog: see `LoopOptions`.
    """

    max_model_len: int
    push: PushSettings
    idle_s: float = 0.1
    heartbeat_s: float = 1.0
    closure_poll_s: float = 0.005
    name: RankName = field(default_factory=lambda: RankName(instance="prefill"))
    max_ahead: int = 0
    enter_thread: Callable[[], None] = lambda: None
    launched: Callable[[], None] = lambda: None
    experts: ExpertTurns = field(default_factory=StandingExperts)
    step_limit_s: Callable[[int], float] = lambda num_tokens: 0.0
    watchdog: WatchdogOptions = field(default_factory=WatchdogOptions)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Chunks of one step, the blocks that they complete, and the step's tensors.

    Or why there are none: then no rank has a part in it, and no sender has heard of it.
    """

    chunks: Sequence[Chunk]
    pushes: Sequence[PushBlocks] = ()
    batch: ForwardBatch | StepError | None = None

    @property
    def num_tokens(self) -> int:
        """Of this rank."""
        return sum(chunk.scheduled.num_scheduled_tokens for chunk in self.chunks)


class EngineLoop:
    """Runs requests from `AddRequest` to `RequestFinished`; the driver of its `steps`.

    `submit` and `load` are for any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        senders: SenderGroup,
        emit: Callable[[Event], None],
        settings: LoopSettings,
        *,
        lockstep: Lockstep | None = None,
        stalls: StallMeter | None = None,
        observe_gap: Callable[[float], None] = lambda seconds: None,
        observe_step: Callable[[int, float], None] = lambda num_tokens, seconds: None,
        tell_cache: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            scheduler: owned by the loop from now on.
            runner: runs the model.
            senders: of all ranks.
            emit: takes events; called on the loop's thread, must not block.
            settings: see `LoopSettings`.
            lockstep: the meeting with the other ranks; None for a rank that schedules alone.
            stalls: through which the local sender is called, to be told of each step's end.
            observe_gap: told how long the device idled between two steps, where that is known.
            observe_step: told the tokens and seconds of each step.
            tell_cache: called after each, to hand over what happened to the prefix cache.
            clock: monotonic seconds.
        """
        self._scheduler, self._runner, self._senders = scheduler, runner, senders
        self._emit, self._settings, self._stalls = emit, settings, stalls
        self._observe_gap, self._observe_step, self._clock = observe_gap, observe_step, clock
        self._tell_cache = tell_cache
        self._requests = RequestLifecycle(
            scheduler, senders, emit, max_model_len=settings.max_model_len, clock=clock
        )
        self._last_exchange = 0.0
        self._load = _measure_load(scheduler)
        options = LoopOptions(
            name=settings.name,
            step="prefill",
            max_ahead=settings.max_ahead,
            ahead_poll_s=AHEAD_POLL_S,
            limit_s=settings.step_limit_s,
            enter_thread=settings.enter_thread,
            launched=settings.launched,
            experts=settings.experts,
            watchdog=settings.watchdog,
            clock=clock,
        )
        self.steps = StepLoop[ChunkPlan](self, lockstep or SoloLockstep(), options)
        self.start, self.stop, self.join = self.steps.start, self.steps.stop, self.steps.join
        self.step, self.take_commands = self.steps.step, self.steps.take_commands

    @property
    def load(self) -> LoopLoad:
        """As of the last step."""
        return self._load

    def submit(self, command: Command) -> None:
        """Enqueue a command; commands are taken between steps, in order."""
        self.steps.post(partial(self._apply, command))

    # What `StepDriver` asks for.

    @property
    def is_empty(self) -> bool:
        """Whether every request has left."""
        return not len(self._requests)

    @property
    def rest_s(self) -> float:
        """Until deadlines, closures or followers have to be looked after."""
        if self._senders.wants_exchange:
            return self._settings.closure_poll_s
        return self._settings.heartbeat_s / 2 if self.is_empty else self._settings.idle_s

    def heard(self) -> None:
        """Ask for tickets: what is new need not wait for a step."""
        self._requests.expire()
        self._requests.want_tickets()

    def plan(self, complete_launched: Callable[[], None]) -> ChunkPlan:
        """Schedule, and tell the senders and the followers what comes."""
        self._requests.expire()
        chunks = self._scheduler.schedule(self._clock())
        self._requests.want_tickets()  # of those behind this step: claims travel while it runs
        batch = self._prepare(chunks)
        if isinstance(batch, StepError):
            self._announce((), ())
            return ChunkPlan(chunks, batch=batch)
        self._requests.open_tickets(chunks)
        pushes = plan_pushes(chunks, self._scheduler.pool.block_size)
        refusal = self._announce(chunks, pushes)
        return ChunkPlan(chunks, pushes, refusal or batch)

    def launch(
        self,
        plan: ChunkPlan,
        after: PendingStep | None,
        group_mean: int,
        meanwhile: Callable[[], None],
    ) -> PendingStep:
        """Issue a step, and what it completes to the sender; first tokens leave meanwhile."""
        if isinstance(plan.batch, StepError):
            raise plan.batch
        pusher = StepPusher(self._senders.local, plan.pushes, self._settings.push)
        pending = self._runner.launch(
            [chunk.scheduled for chunk in plan.chunks],
            batch=plan.batch,
            on_layer_done=pusher.on_layer_done,
            meanwhile=meanwhile,
        )
        pusher.finish()
        return pending

    def launch_dummy(self, group_mean: int) -> None:
        """Run a padding token."""
        self._runner.run_dummy()

    def give_up(self, plan: ChunkPlan, error: StepError) -> None:
        """What was to be computed is not."""
        for chunk in plan.chunks:
            self._scheduler.take_back(chunk)
            if error.ends(chunk.item.request_id):
                self._requests.fail(chunk.item, error.answer(chunk.item.request_id))
            self._requests.settle(chunk.item)

    def answer(self, plan: ChunkPlan, results: Sequence[StepResult], seconds: float) -> None:
        """Send first tokens before the layer for drafts is through; KV and drafts follow."""
        for chunk, result in zip(plan.chunks, results, strict=True):
            if result.sampled is not None and chunk.item.status is PrefillStatus.RUNNING:
                self._requests.answer(chunk.item, result, seconds)

    def book(
        self, plan: ChunkPlan, results: Sequence[StepResult], seconds: float, idle_s: float | None
    ) -> None:
        """Carry on with the requests of a step."""
        self._observe_step(plan.num_tokens, seconds)
        self._scheduler.steps.observe(plan.num_tokens, seconds)
        if idle_s is not None:
            self._observe_gap(idle_s)
        for chunk, result in zip(plan.chunks, results, strict=True):
            item = chunk.item
            self._scheduler.advance(chunk)
            if result.is_failed:
                failure = item.request.failure
                failure.request_id = item.request_id
                self._requests.fail(item, failure)
            elif item.status is PrefillStatus.RUNNING:
                if result.sampled is not None:
                    self._requests.complete(item, result, seconds)
                item.prompt_logprobs += result.prompt_logprobs
            item.compute_s += seconds
            self._requests.settle(item)

    def tell(self) -> None:
        """Measure."""
        if self._stalls:
            self._stalls.end_step()
        self._load = _measure_load(self._scheduler)
        self._tell_cache()

    def check_integrity(self) -> None:
        """Of queues and blocks."""
        self._scheduler.check_integrity()

    def leave(self) -> None:
        """Let the followers go."""
        self._senders.stop()

    def end(self, error: TandemError | None) -> None:
        """Answer everybody."""
        ended = LoopEnded(self._settings.name, error)
        self._requests.fail_all(ended)
        self._emit(ended)

    def _apply(self, command: Command) -> None:
        match command:
            case AddRequest(item):
                self._requests.add(item)
            case CancelRequest(nonce, error):
                self._requests.cancel(nonce, error)
            case TicketClaimed(nonce, grant):
                self._requests.ticket_claimed(nonce, grant)
            case ClaimFailed(nonce, error):
                self._requests.claim_failed(nonce, error)
            case GiveBack(error, also_begun):
                self._requests.give_back(error, also_begun=also_begun)
            case RankClosed(rank, closure):
                self._requests.rank_closed(rank, closure)
            case StopLoop():
                self.steps.leave()

    def _prepare(self, chunks: Sequence[Chunk]) -> ForwardBatch | StepError | None:
        """The step's tensors, before anybody is told of it; or why they cannot be made."""
        if not chunks:
            return None
        try:
            return self._runner.prepare([chunk.scheduled for chunk in chunks])
        except StepError as error:
            return error

    def _announce(self, chunks: Sequence[Chunk], pushes: Sequence[PushBlocks]) -> StepError | None:
        """Tell the followers what comes; why no rank runs it, if one of them cannot."""
        if not self._senders.has_followers:
            return None
        now = self._clock()
        is_due = now - self._last_exchange >= self._settings.heartbeat_s
        if chunks or is_due or self._senders.wants_exchange:
            self._last_exchange = now
            with self.steps.watch("telling the ranks of a prefill step"):
                answer = self._senders.announce(chunks, pushes)
            for closed in answer.closed:
                # Not applied in the middle of a step: one of its requests may have failed.
                self.submit(closed)
            return answer.refusal
        return None


def _measure_load(scheduler: Scheduler) -> LoopLoad:
    by_tier = scheduler.tokens_by_tier()
    return LoopLoad(
        num_waiting=len(scheduler.waiting),
        num_claiming=len(scheduler.claiming),
        num_running=len(scheduler.running),
        num_sending=len(scheduler.sending),
        num_tokens_waiting=sum(tier.num_tokens for tier in by_tier),
        tokens_by_tier=by_tier,
        num_free_blocks=scheduler.pool.num_free_blocks,
        num_total_blocks=scheduler.pool.num_usable_blocks,
    )
