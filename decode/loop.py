"""The engine loop: one thread that owns every request of the rank and runs its steps.

Other threads never touch the rank; they submit commands, which the loop runs between two steps. It
blocks on nothing but the step itself and, in a group, on the other ranks of the same step. A rank
with nothing to do sleeps until a command comes; in a group only for a few milliseconds, because
another rank may need it for its own step.

With `max_ahead` 1 a step is launched before the tokens of the one before it are read, so that a GPU
never waits for the host: the requests of both take their tokens from the device. Whether a request
has ended is then known one step late; the token that the late step gives it is dropped, and its
blocks are free when that step is over.

If anything in a step fails, the rank cannot know what state the model or the group is in: every
request is answered with an error (see `runtime.endings`), later commands are refused, and `on_end`
tells the process, which exits. The failure of one request never comes here; the rank handles it. So
it does where a step, or the meeting before it, never returns: a `Watchdog` then stands in for this
thread.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from decode.frames import Delta
from decode.metrics import DecodeMetrics
from decode.rank import DecodeRank
from decode.scheduler import StepPlan
from engine.parallel.lockstep import GroupState, IdlePace, Lockstep, RankState
from engine.parallel.lost_peer import reason_of_end
from engine.request import ScheduledRequest
from engine.runner import PendingStep
from runtime.endings import RankName, failure_of_requests, refusal_of_calls
from runtime.errors import InternalError, PeerLostError, TandemError
from runtime.logging import get_logger
from runtime.pb import decode_pb2
from runtime.watchdog import AbandonedError, Watchdog, WatchdogOptions

logger = get_logger(__name__)

IDLE_WAIT_S = 0.05
"""Alone and idle: deadlines are looked at so often."""

ResultT = TypeVar("ResultT")
Command = Callable[[], None]


class StepRunner(Protocol):
    """What the loop needs of a model runner."""

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        after: PendingStep | None = None,
        least: int = 0,
    ) -> PendingStep:
        """Issue one step to the device and return without waiting for it.

        Args:
            scheduled: at least one request, one token each; what they hold is read now.
            after: the step before, if its tokens are not read: they are what `scheduled` runs where
                `num_unread` says so.
            least: the most tokens that a rank of the group runs in this step.
        """
        ...

    def run_dummy(self, *, least: int = 0) -> None:
        """Launch our part in the other ranks' step without a request of our own."""
        ...


class Publisher(Protocol):
    """Where a step's news go; called on the loop's thread."""

    def __call__(self, news: Mapping[str, list[Delta]], load: decode_pb2.LoadReport) -> None:
        """Hand over without blocking."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaunchedStep:
    """Its tokens are not read; `follows` a step directly, so that idling in between is a loss."""

    plan: StepPlan
    pending: PendingStep
    launched_at: float
    follows: bool


class EngineLoop:
    """The thread, its command queue and its end."""

    def __init__(
        self,
        rank: DecodeRank,
        runner: StepRunner,
        lockstep: Lockstep,
        *,
        metrics: DecodeMetrics,
        publish: Publisher,
        on_end: Callable[[TandemError | None], None],
        max_ahead: int = 0,
        step_timeout_s: float = 0.0,
        watchdog: WatchdogOptions | None = None,
        name: RankName | None = None,
    ) -> None:
        """Build; `start` runs it.

        Args:
            rank: belongs to the loop from `start` to its end.
            runner: of this rank's model.
            lockstep: the meeting with the other ranks.
            metrics: of the process.
            publish: takes the news of every step.
            on_end: called last; None after `stop`, else what went wrong.
            max_ahead: steps that may run while another is launched: 0 or 1.
            step_timeout_s: a step that takes longer ends the loop; 0 for no limit.
            watchdog: how that is noticed.
            name: of the rank, for its last words.
        """
        self._rank = rank
        self._runner = runner
        self._lockstep = lockstep
        self._metrics = metrics
        self._publish = publish
        self._on_end = on_end
        self._max_ahead = max_ahead
        self._step_timeout_s = step_timeout_s
        self._watchdog = Watchdog(self._end, watchdog)
        self._name = name or RankName(instance="decode")
        self._in_flight: deque[_LaunchedStep] = deque()
        self._is_following = False  # the latest turn launched a step
        self._taken_over_at = 0.0
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._leaving = False
        self._was_idle = True
        self._pace = IdlePace()
        self._over: TandemError | None = None
        self._lock = threading.Lock()  # orders submit against the end of the loop
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        """Run until `stop` or a failure."""
        self._watchdog.start()
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End the loop once no rank of the group needs another step; whether it ended in time."""
        if self._watchdog.is_overdue:
            return False
        self._commands.put(self._leave)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, work: Callable[[], ResultT]) -> Future[ResultT]:
        """Run `work` on the loop's thread between two steps.

        A TandemError that it raises is the future's. So is any other exception, which also ends
        the loop, as a broken invariant does. After the end of the loop the future fails at once.
        """
        future: Future[ResultT] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, TandemError) or isinstance(error, InternalError):
                    raise

        with self._lock:
            if self._over is not None:
                future.set_exception(self._over)
            else:
                self._commands.put(command)
        return future

    def _leave(self) -> None:
        self._leaving = True

    def _run(self) -> None:
        error: TandemError | None = None
        try:
            while not self._step():
                pass
            self._take_over_all_but(0)
        except AbandonedError:
            return  # the watchdog has ended the loop
        except Exception as caught:
            if self._leaving and self._rank.is_empty and isinstance(caught, PeerLostError):
                logger.info("the other ranks left first")
            else:
                logger.exception("the engine loop failed")
                error = reason_of_end(caught, in_group=self._name.num_ranks > 1)
        self._watchdog.close()
        self._end(error)

    def _step(self) -> bool:
        """One turn: a step, or a rest where nobody has work; whether it was the last."""
        self._run_commands()
        plan = self._rank.plan_step(self._complete_launched)
        state = RankState(
            num_tokens=len(plan.requests),
            leaving=self._leaving,
            in_flight=bool(self._in_flight),
        )
        with self._watch("the meeting of the ranks before a decode step"):
            group = self._lockstep.exchange(state)
        is_launched = self._launch(plan, group)
        self._take_over_all_but(self._max_ahead if is_launched else 0)
        self._tell()
        self._rest(group)
        return group.all_leaving

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _launch(self, plan: StepPlan, group: GroupState) -> bool:
        """Launch our part of the group's step; whether results will come of it."""
        follows, self._is_following = self._is_following, group.has_work
        if not plan.requests:
            if group.has_work:
                with self._watch("the launch of a decode step"):
                    self._runner.run_dummy(least=group.max_num_tokens)
            return False
        launched_at = time.perf_counter()
        with self._watch("the launch of a decode step"):
            pending = self._runner.launch(
                plan.scheduled,
                after=self._in_flight[-1].pending if self._in_flight else None,
                least=group.max_num_tokens,
            )
        step = _LaunchedStep(plan=plan, pending=pending, launched_at=launched_at, follows=follows)
        self._in_flight.append(step)
        return True

    def _complete_launched(self) -> None:
        self._take_over_all_but(0)

    def _take_over_all_but(self, num_steps: int) -> None:
        while len(self._in_flight) > num_steps:
            self._take_over(self._in_flight.popleft())

    def _take_over(self, step: _LaunchedStep) -> None:
        """Wait for a step's tokens and book them."""
        with self._watch("a decode step"):
            sampled = [result.sampled for result in step.pending.collect()]
        now = time.perf_counter()
        seconds = now - max(step.launched_at, self._taken_over_at)
        self._taken_over_at = now
        num_tokens = self._rank.complete_step(step.plan, sampled)
        self._metrics.stepped(len(sampled), num_tokens, seconds)
        idle_s = step.pending.idle_s
        if step.follows and idle_s is not None:
            self._metrics.step_waited(idle_s)

    def _watch(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Limit the time of a call that may never return; nothing of the rank is changed in it."""
        return self._watchdog.watch(what, self._step_timeout_s)

    def _tell(self) -> None:
        self._publish(self._rank.news.take(), self._rank.load())

    def _rest(self, group: GroupState) -> None:
        """Sleep until a command comes, if nobody has work."""
        if group.has_work or group.in_flight or group.all_leaving:
            self._was_idle = False
            self._pace.was_busy()
            return
        if not self._was_idle and self._rank.is_empty:
            self._was_idle = True
            self._rank.check_integrity()
        with contextlib.suppress(queue.Empty):
            command = self._commands.get(timeout=self._idle_wait_s())
            self._was_idle = False
            command()

    def _idle_wait_s(self) -> float:
        return self._pace.wait_s if self._lockstep.is_group else IDLE_WAIT_S

    def _end(self, error: TandemError | None) -> None:
        """Answer everybody; on the loop's thread, or on the watchdog's in its stead."""
        with self._lock:
            self._over = refusal_of_calls(self._name)
        self._run_last_commands()
        try:
            self._rank.live.fail_all(failure_of_requests(self._name, error))
            self._tell()
        except Exception:
            logger.exception("requests could not be answered")
        self._on_end(error)

    def _run_last_commands(self) -> None:
        """What was submitted before the end has a future that somebody waits for."""
        while True:
            try:
                self._run_commands()
                return
            except Exception:
                logger.exception("a command failed after the end of the loop")
