"""The engine loop of either role: plan, meet, launch, take over, on a thread of its own.

The only thread that touches a rank's requests. Others submit commands, which run between two steps;
it blocks on nothing but its steps and, in a group, on the other ranks. What is in a step, a role's
`StepDriver` decides.

With `max_ahead` 1 a step is launched before the results of the one before it are read, so that a
GPU never waits for the host. What happens to a request meanwhile finds it in a step that cannot be
taken back; drivers drop such results, and keep the blocks until then. Results do not wait for a
launch, which may take longer than the rest of the step before it: a driver lets them through in the
middle of it (`meanwhile`).

Data-parallel ranks share experts, so they launch the same number of steps: before each launch they
meet (`engine.parallel.lockstep`), once however many are unread, and a rank without work of its own
runs a dummy. Experts that move change their slots right before such a meeting
(`engine.experts.rebalancer`). While nobody has work they meet every few milliseconds, also where
one waits for its step's end. A rank alone sleeps until a command comes.

A step that fails alone (`StepError`) is given up: the driver ends its requests, and the next step
follows. If anything else fails, nobody knows the state of the model or the group: the driver
answers every request, later commands are refused, and `ended` says why. So it goes where a call
never returns, with a watchdog that stands in for this thread, and where step after step fails: a
rank that gives nothing but errors is worse than none.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic

from engine.experts.votes import ExpertTurns
from engine.parallel.lockstep import GroupState, IdlePace, Lockstep, RankState
from engine.pending_step import PendingStep
from engine.step_error import StepError, reason_of_end
from runtime.errors import InternalError, PeerLostError, TandemError
from runtime.logging import get_logger
from worker.command_queue import CommandQueue
from worker.endings import refusal_of_calls
from worker.step_driver import LoopOptions, PlanT, StepDriver
from worker.watchdog import StepOverdueError
from worker.watched_thread import WatchedThread

logger = get_logger(__name__)

_IDLE = GroupState(has_work=False, max_num_tokens=0, mean_num_tokens=0, all_leaving=False)

MAX_FAILED_STEPS = 8
"""In a row, of none of which a request is known to be the cause; then the rank ends."""


class _Failures:
    """Steps that failed in a row, and what was raised where no step failed."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.of_books: BaseException | None = None

    def add(self, error: StepError) -> None:
        """Another step failed; raise InternalError if that was the last that may."""
        if error.request_id:
            return
        self.num_steps += 1
        if self.num_steps >= MAX_FAILED_STEPS:
            text = f"{self.num_steps} steps in a row failed, the last of them: {error.message}"
            raise InternalError(text) from error


@dataclass(frozen=True, slots=True)
class _Launched(Generic[PlanT]):
    """Its results are not read; `follows` a step directly, so that idling in between is a loss."""

    plan: PlanT
    pending: PendingStep
    launched_at: float
    follows: bool
    num_tokens: int
    """Of the rank that has most: the others wait for it in every layer."""

    @property
    def idle_s(self) -> float | None:
        """See `StepDriver.book`."""
        return self.pending.idle_s if self.follows else None

    def seconds(self, now: float, before: float) -> float:
        """How long it has run alone until now; the step before it was over at `before`."""
        return now - max(self.launched_at, before)


class StepLoop(Generic[PlanT]):
    """The thread, its command queue and its end. `submit`, `post`, `stop` are for any thread."""

    def __init__(self, driver: StepDriver[PlanT], lockstep: Lockstep, options: LoopOptions) -> None:
        """Nothing runs before `start`; what `driver` owns belongs to the loop from then on."""
        self._driver, self._lockstep, self._options = driver, lockstep, options
        self._clock = options.clock
        self._commands = CommandQueue()
        self.submit, self.post = self._commands.submit, self._commands.post
        self._in_flight: deque[_Launched[PlanT]] = deque()
        # Tokens of the latest steps, each of the rank that has most.
        self._launched_tokens = deque([0], maxlen=options.max_ahead + 1)
        self._is_following = False  # the latest turn launched something
        self._failures = _Failures()
        self._taken_over_at = 0.0
        self._pace = IdlePace(self._clock)
        self._group = _IDLE
        self._leaving = self._is_checked = False
        self._turned_at: float | None = None  # since when a turn with work runs
        self.num_tokens = 0
        """Of our own in all steps of the group."""
        self.num_tokens_of_most = 0
        """In the same steps, of the rank that had most: the others waited for it."""
        self._thread = WatchedThread("engine-loop", self._run, self._end, options.watchdog)
        self.ended = self._thread.ended
        """Done last, with what ended the loop; None after `stop`."""
        self.other_leaves: Future[None] = Future()
        """Done when another rank of the group was told to stop, and this one was not."""
        self.start, self.join = self._thread.start, self._thread.join

    @property
    def is_overdue(self) -> bool:
        """Whether the thread hangs in a step that was given up."""
        return self._thread.is_overdue

    @property
    def is_alive(self) -> bool:
        """Whether it takes turns."""
        return self._thread.is_alive

    @property
    def turn_age_s(self) -> float:
        """Seconds since the latest turn began; 0 while nobody has work."""
        turned_at = self._turned_at
        return 0.0 if turned_at is None else self._clock() - turned_at

    def stop(self, timeout_s: float) -> bool:
        """End the loop once no rank of the group needs another step; whether it ended in time."""
        if self.is_overdue:
            return False
        self.post(self.leave)
        return self.join(timeout_s)

    def leave(self) -> None:
        """What `stop` does, on the loop's thread."""
        self._leaving = True

    def take_commands(self, timeout_s: float = 0.0) -> bool:
        """Carry out what is in the queue, waiting at most `timeout_s` for a first; if any was."""
        is_any = False
        while not self._is_over:
            command = self._commands.next(0.0 if is_any else timeout_s)
            if command is None:
                break
            is_any = True
            command.run()
        if is_any:
            self._driver.heard()
        return is_any

    def turn(self) -> bool:
        """One step, or a rest where nobody has work; whether anybody had."""
        is_busy = self.step()
        self._check_books(is_busy)
        if not is_busy:
            self._turned_at = None
        self.take_commands(0.0 if is_busy else self._rest_s)
        return is_busy

    def step(self) -> bool:
        """Launch a step if there is one, take over those that it need not wait for; if either."""
        self._turned_at = self._clock()
        is_launched = self._launch_next()
        is_busy = self._group.has_work or self._group.in_flight
        if self._group.has_work or not self._await_news():
            self._take_over_all_but(self._options.max_ahead if is_launched else 0)
        self._driver.tell()
        return is_busy

    def watch(self, what: str, num_tokens: int | None = None) -> AbstractContextManager[None]:
        """Limit the time of a call that may never return; no request is changed in it.

        Args:
            what: names it in the error.
            num_tokens: of the step; None where it waits for other ranks, which may still run what
                was launched before.
        """
        most = max(self._launched_tokens) if num_tokens is None else num_tokens
        return self._thread.watch(what, self._options.limit_s(most))

    @property
    def _is_over(self) -> bool:
        """In a group a rank that was told to stop goes on until nobody needs it."""
        return self._group.all_leaving if self._lockstep.is_group else self._leaving

    @property
    def _rest_s(self) -> float:
        return self._pace.wait_s if self._lockstep.is_group else self._driver.rest_s

    def _launch_next(self) -> bool:
        """Launch our part of the group's step; whether results will come of it."""
        plan = self._driver.plan(lambda: self._take_over_all_but(0))
        group = self._group = self._meet(plan.num_tokens)
        follows, self._is_following = self._is_following, group.has_work
        most = group.max_num_tokens
        if not plan.num_tokens and not group.has_work:
            return False
        self.num_tokens += plan.num_tokens
        self.num_tokens_of_most += most
        launched_at = self._clock()
        after = self._in_flight[-1].pending if self._in_flight else None
        try:
            with self.watch(f"the launch of a {self._options.step} step", most):
                pending = self._issue(plan, after, group.mean_num_tokens)
        except StepError as error:
            pending = None
            self._give_up(plan, error)
        self._options.launched()  # the others launch it, too
        if pending is None:
            return False
        self._in_flight.append(_Launched(plan, pending, launched_at, follows, most))
        return True

    def _issue(self, plan: PlanT, after: PendingStep | None, mean: int) -> PendingStep | None:
        """Launch our part in the step; None where nothing is to be read of it."""
        if not plan.num_tokens:
            self._driver.launch_dummy(mean)
            return None
        try:
            return self._driver.launch(plan, after, mean, self._take_over_ended)
        except StepError as error:
            if self._failures.of_books is not None:
                raise self._failures.of_books from None
            if not error.has_joined and self._lockstep.is_group:
                self._driver.launch_dummy(mean)  # the others are in the step
            raise

    def _give_up(self, plan: PlanT, error: StepError) -> None:
        """Carry on without a step that failed alone."""
        logger.error("a %s step failed", self._options.step, exc_info=error)
        self._driver.give_up(plan, error)
        self._failures.add(error)

    def _meet(self, num_tokens: int) -> GroupState:
        state = RankState(
            num_tokens=num_tokens, leaving=self._leaving, in_flight=bool(self._in_flight)
        )
        with self.watch(f"the meeting of the ranks before a {self._options.step} step"):
            group = _exchange(self._lockstep, state, self._options.experts)
        if group.any_leaving and not self._leaving and not self.other_leaves.done():
            self.other_leaves.set_result(None)
        if group.has_work:
            self._launched_tokens.append(group.max_num_tokens)
        if group.has_work or group.in_flight:
            self._pace.was_busy()
        return group

    def _await_news(self) -> bool:
        """While the last step runs, let commands in; whether to look for a step before its end.

        Commands may bring one, and in a group another rank may have one. Only for as long as the
        step may take: then its results are waited for, under watch.
        """
        poll_s = self._options.ahead_poll_s
        if not poll_s or not self._in_flight:
            return False
        last, is_group = self._in_flight[-1], self._lockstep.is_group
        late_at = last.launched_at + (self._options.limit_s(last.num_tokens) or float("inf"))
        meet_at = self._clock() + self._pace.wait_s
        while not (last.pending.is_done or self._is_over or self._clock() >= late_at):
            if self.take_commands(poll_s) or (is_group and self._clock() >= meet_at):
                return True
        return False

    def _take_over_all_but(self, num_steps: int) -> None:
        """Wait for the ends of the oldest steps, and carry on with their requests."""
        while len(self._in_flight) > num_steps:
            self._take_over_next()

    def _take_over_ended(self) -> None:
        """Carry on with the requests of steps that are over; in the middle of a launch."""
        while self._in_flight and self._in_flight[0].pending.is_done:
            with self._thread.unwatched():
                try:
                    self._take_over_next()
                except BaseException as error:
                    self._failures.of_books = error
                    raise

    def _take_over_next(self) -> None:
        step, before = self._in_flight.popleft(), self._taken_over_at
        watch = partial(self.watch, f"a {self._options.step} step", step.num_tokens)
        try:
            with watch(), self._options.device_wait():
                sampled = step.pending.collect_sampled()
            if sampled is not None:
                self._driver.answer(step.plan, sampled, step.seconds(self._clock(), before))
            with watch(), self._options.device_wait():
                results = step.pending.collect()
        except StepError as error:
            self._give_up(step.plan, error)
            return
        self._failures.num_steps = 0
        now = self._taken_over_at = self._clock()
        self._driver.book(step.plan, results, step.seconds(now, before), step.idle_s)

    def _check_books(self, is_busy: bool) -> None:
        """Check once, whenever the last request has left, that it took nothing along."""
        if is_busy or not self._driver.is_empty:
            self._is_checked = False
        elif not self._is_checked:
            self._driver.check_integrity()
            self._is_checked = True

    def _run(self) -> None:
        self._options.enter_thread()
        self.take_commands()
        while not self._is_over:
            self.turn()
        self._take_over_all_but(0)
        self._driver.leave()

    def _end(self, caught: BaseException | None) -> TandemError | None:
        """Answer everybody; on the loop's thread, or on the watchdog's in its stead."""
        error = self._reason_of(caught)
        self._commands.close(refusal_of_calls(self._options.name))
        try:
            self._driver.end(error)
        except Exception:
            logger.exception("requests could not be answered")
        return error

    def _reason_of(self, caught: BaseException | None) -> TandemError | None:
        if caught is None or isinstance(caught, StepOverdueError):
            return caught
        if self._leaving and self._driver.is_empty and isinstance(caught, PeerLostError):
            logger.info("the other ranks left first")
            return None
        logger.error("the engine loop failed", exc_info=caught)
        return reason_of_end(caught, in_group=self._options.name.num_ranks > 1)


def _exchange(lockstep: Lockstep, state: RankState, experts: ExpertTurns) -> GroupState:
    """Say our state, with how our experts stand, and carry on with those that move as all do."""
    group = lockstep.exchange(replace(state, experts=experts.say()))
    experts.hear(group.experts, has_work=group.has_work)
    return group
