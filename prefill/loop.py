"""The engine loop: schedule, announce, launch, take over, on a thread of its own.

With `max_ahead` 1 the next step is launched before the results of the running one are read, so that
a GPU never waits for the host: chunks depend on nothing that a step finds out. What happens to a
request meanwhile (a cancel, a deadline, a sender that fails) finds it in a step that cannot be
taken back: its result is dropped, and its blocks stay until then.

The only thread that touches the scheduler, the block pool and the requests in them. It never waits
for the network: the asyncio side and the sender's threads put commands into its queue, and it
answers with events. With nothing to run it sleeps on that queue. Followers, if there are any, are
told of every step, and hear something now and then when there is none. A step that never returns is
given up by a `Watchdog`, which answers everybody in this thread's stead.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from engine.request import ScheduledRequest
from engine.runner import StepResult
from prefill.commands import PushBlocks
from prefill.kv_push import PushSettings, StepPusher, plan_pushes
from prefill.messages import (
    AddRequest,
    CancelRequest,
    Command,
    Event,
    LoopEnded,
    LoopLoad,
    RankClosed,
    StopLoop,
)
from prefill.request import Chunk
from prefill.request_desk import RequestDesk
from prefill.scheduler import Scheduler
from prefill.sender_group import SenderGroup
from prefill.stall import StallMeter
from runtime.lifecycle import PrefillStatus
from runtime.logging import get_logger
from runtime.watchdog import AbandonedError, Watchdog, WatchdogOptions

logger = get_logger(__name__)


AHEAD_POLL_S = 0.0005
"""While the last step runs and nothing else can: so often it is looked at, between commands."""


class PendingStep(Protocol):
    """A launched step."""

    @property
    def is_done(self) -> bool:
        """Whether `collect` would return at once."""
        ...

    @property
    def idle_s(self) -> float | None:
        """Seconds that the device idled before the step, after `collect`; None if unknown."""
        ...

    def collect(self) -> list[StepResult]:
        """Wait for the step's end; one result per scheduled request, in order."""
        ...


class StepRunner(Protocol):
    """The part of `engine.runner.ModelRunner` that the loop uses."""

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        on_layer_done: Callable[[int], None] | None = None,
        keep_hidden: bool = False,
    ) -> PendingStep:
        """Issue one step to the device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What does not change while the loop runs; times in seconds.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        push: how layers are grouped for sending.
        keep_hidden: send the last hidden state along, for MTP.
        max_ahead: steps that may run while another is launched; 0 on a CPU, which runs one at once.
        idle_s: how often a loop that can run nothing looks at deadlines.
        heartbeat_s: followers hear of us at least so often.
        closure_poll_s: how often followers that owe closures are asked.
        step_limit_s: how long a step of so many tokens may take; 0 for no limit.
        watchdog: how it is noticed that one takes longer.
    """

    max_model_len: int
    push: PushSettings
    keep_hidden: bool = False
    max_ahead: int = 0
    idle_s: float = 0.1
    heartbeat_s: float = 1.0
    closure_poll_s: float = 0.005
    step_limit_s: Callable[[int], float] = lambda num_tokens: 0.0
    watchdog: WatchdogOptions = field(default_factory=WatchdogOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaunchedStep:
    """Its chunks are in flight; `follows` a step directly, so that idling in between is a loss."""

    chunks: Sequence[Chunk]
    pending: PendingStep
    launched_at: float
    follows: bool

    @property
    def num_tokens(self) -> int:
        """Tokens that it runs."""
        return sum(chunk.scheduled.num_scheduled_tokens for chunk in self.chunks)


class EngineLoop:
    """Runs requests from `AddRequest` to `RequestFinished`.

    `submit` and `load` are for any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        senders: SenderGroup,
        emit: Callable[[Event], None],
        settings: LoopSettings,
        *,
        stalls: StallMeter | None = None,
        observe_gap: Callable[[float], None] = lambda seconds: None,
        observe_step: Callable[[int, float], None] = lambda num_tokens, seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            scheduler: owned by the loop from now on.
            runner: runs the model.
            senders: of all ranks.
            emit: takes events; called on the loop's thread, must not block.
            settings: see `LoopSettings`.
            stalls: through which the senders' local one is called, to be told of each step's end.
            observe_gap: told how long the device idled between two steps, where that is known.
            observe_step: told the tokens and seconds of each step.
            clock: monotonic seconds.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._senders = senders
        self._emit = emit
        self._settings = settings
        self._stalls = stalls
        self._observe_gap = observe_gap
        self._observe_step = observe_step
        self._clock = clock
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._desk = RequestDesk(
            scheduler, senders, emit, max_model_len=settings.max_model_len, clock=clock
        )
        self._in_flight: deque[_LaunchedStep] = deque()
        self._is_following = False  # the latest turn launched a step
        self._taken_over_at = 0.0
        self._stopping = False
        self._is_checked = False
        self._last_exchange = 0.0
        self._load = _measure_load(scheduler)
        self._watchdog = Watchdog(self._end, settings.watchdog)
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    @property
    def load(self) -> LoopLoad:
        """As of the last step."""
        return self._load

    @property
    def is_started(self) -> bool:
        """Whether the thread was ever started."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Start the thread."""
        self._watchdog.start()
        self._thread.start()

    @property
    def is_abandoned(self) -> bool:
        """Whether the thread hangs in a step that was given up."""
        return self._watchdog.is_overdue

    def submit(self, command: Command) -> None:
        """Enqueue a command; commands are taken between steps, in order."""
        self._commands.put(command)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread's end; whether it has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def step(self) -> bool:
        """Launch a step if there is one, take over those that it need not wait for; if either."""
        is_launched = self._launch_next()
        is_busy = is_launched or bool(self._in_flight)
        if is_launched or not self._await_news():
            self._take_over_all_but(self._settings.max_ahead if is_launched else 0)
        if self._stalls:
            self._stalls.end_step()
        self._load = _measure_load(self._scheduler)
        return is_busy

    def take_commands(self, timeout_s: float = 0.0) -> bool:
        """Carry out what is in the queue, waiting at most `timeout_s` for a first; if any was."""
        is_any = False
        try:
            command = self._commands.get(block=timeout_s > 0, timeout=timeout_s or None)
            while not self._stopping:
                is_any = True
                self._apply(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            pass
        return is_any

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while not self._stopping:
                busy = self.step()
                self._check_when_idle()
                self.take_commands(0.0 if busy else self._idle_s())
            self._take_over_all_but(0)
            self._senders.stop()
        except AbandonedError:
            return  # the watchdog has ended the loop
        except BaseException as caught:
            error = caught
            logger.exception("the engine loop failed")
        self._watchdog.close()
        self._end(error)

    def _idle_s(self) -> float:
        if self._senders.wants_exchange:
            return self._settings.closure_poll_s
        return self._settings.idle_s if len(self._desk) else self._settings.heartbeat_s / 2

    def _check_when_idle(self) -> None:
        """Check once, whenever the last request has left, that it took nothing along."""
        if len(self._desk):
            self._is_checked = False
        elif not self._is_checked:
            self._scheduler.check_integrity()
            self._is_checked = True

    def _end(self, error: BaseException | None) -> None:
        cause = "the prefill worker stopped" if error is None else f"engine loop: {error!r}"
        self._desk.fail_all(cause)
        self._emit(LoopEnded(error))

    def _apply(self, command: Command) -> None:
        match command:
            case AddRequest(item):
                self._desk.add(item)
            case CancelRequest(nonce, error):
                self._desk.cancel(nonce, error)
            case RankClosed(rank, closure):
                self._desk.rank_closed(rank, closure)
            case StopLoop():
                self._stopping = True

    def _announce(self, chunks: Sequence[Chunk], pushes: Sequence[PushBlocks]) -> None:
        if not self._senders.has_followers:
            return
        now = self._clock()
        is_due = now - self._last_exchange >= self._settings.heartbeat_s
        if chunks or is_due or self._senders.wants_exchange:
            self._last_exchange = now
            # The followers may still run what was launched before.
            num_tokens = max((step.num_tokens for step in self._in_flight), default=0)
            with self._watch("telling the ranks of a prefill step", num_tokens):
                closures = self._senders.announce(chunks, pushes)
            for closed in closures:
                # Not applied in the middle of a step: one of its requests may have failed.
                self._commands.put(closed)

    def _launch_next(self) -> bool:
        self._desk.expire()
        chunks = self._scheduler.schedule()
        self._desk.open_tickets(chunks)
        pushes = plan_pushes(chunks, self._scheduler.pool.block_size)
        self._announce(chunks, pushes)
        if chunks:
            launched_at = self._clock()
            pending = self._launch(chunks, pushes)
            step = _LaunchedStep(
                chunks=chunks,
                pending=pending,
                launched_at=launched_at,
                follows=self._is_following,
            )
            self._in_flight.append(step)
        self._is_following = bool(chunks)
        return bool(chunks)

    def _launch(self, chunks: Sequence[Chunk], pushes: Sequence[PushBlocks]) -> PendingStep:
        pusher = StepPusher(self._senders.local, pushes, self._settings.push)
        scheduled = [chunk.scheduled for chunk in chunks]
        num_tokens = sum(item.num_scheduled_tokens for item in scheduled)
        with self._watch("the launch of a prefill step", num_tokens):
            pending = self._runner.launch(
                scheduled,
                on_layer_done=pusher.on_layer_done,
                keep_hidden=self._settings.keep_hidden,
            )
        pusher.finish()
        return pending

    def _await_news(self) -> bool:
        """While the last step runs, let commands in; whether one came, which may bring a step.

        Only for as long as it may take: then its results are waited for, under watch.
        """
        if not self._in_flight:
            return False
        step = self._in_flight[-1]
        limit_s = self._settings.step_limit_s(step.num_tokens) or float("inf")
        while not step.pending.is_done and self._clock() < step.launched_at + limit_s:
            if self.take_commands(AHEAD_POLL_S):
                return True
        return False

    def _take_over_all_but(self, num_steps: int) -> None:
        while len(self._in_flight) > num_steps:
            self._take_over(self._in_flight.popleft())

    def _take_over(self, step: _LaunchedStep) -> None:
        """Wait for a step's end, and carry on with every request that is not over meanwhile."""
        with self._watch("a prefill step", step.num_tokens):
            results = step.pending.collect()
        now = self._clock()
        duration = now - max(step.launched_at, self._taken_over_at)
        self._taken_over_at = now
        self._observe_step(step.num_tokens, duration)
        idle_s = step.pending.idle_s
        if step.follows and idle_s is not None:
            self._observe_gap(idle_s)
        for chunk, result in zip(step.chunks, results, strict=True):
            item = chunk.item
            item.compute_s += duration
            self._scheduler.advance(chunk)
            if result.is_failed:
                self._desk.fail(item)
            elif item.status is PrefillStatus.RUNNING:
                item.prompt_logprobs += result.prompt_logprobs
                if result.sampled is not None:
                    self._desk.complete(item, result)
            self._desk.settle(item)

    def _watch(self, what: str, num_tokens: int) -> AbstractContextManager[None]:
        """Limit the time of a call that may never return; no request is changed in it."""
        return self._watchdog.watch(what, self._settings.step_limit_s(num_tokens))


def _measure_load(scheduler: Scheduler) -> LoopLoad:
    return LoopLoad(
        num_waiting=len(scheduler.waiting),
        num_running=len(scheduler.running),
        num_sending=len(scheduler.sending),
        num_tokens_waiting=scheduler.num_tokens_waiting,
        num_free_blocks=scheduler.pool.num_free_blocks,
        num_total_blocks=scheduler.pool.num_usable_blocks,
    )
