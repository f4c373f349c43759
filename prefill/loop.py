"""The engine loop: schedule, announce, launch, take over, on a thread of its own.

With `max_ahead` 1 the next step is launched before the results of the running one are read, so that
a GPU never waits for the host: chunks depend on nothing that a step finds out. What happens to a
request meanwhile (a cancel, a deadline, a sender that fails) finds it in a step that cannot be
taken back: its result is dropped, and its blocks stay until then.

Ranks of a data-parallel instance share experts, so they launch the same number of steps: before
each launch they meet (`engine.parallel.lockstep`), and a rank without work of its own runs a dummy.
They meet once per launched step, however many are unread, and while nobody has work every few
milliseconds, also where a rank waits for its step's end: another may have a prompt meanwhile.

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

from engine.parallel.lockstep import GroupState, IdlePace, Lockstep, RankState, SoloLockstep
from engine.parallel.lost_peer import reason_of_end
from prefill.commands import PushBlocks
from prefill.kv_push import PushSettings, plan_pushes
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
from prefill.request_desk import RequestDesk
from prefill.scheduler import Scheduler
from prefill.sender_group import SenderGroup
from prefill.stall import StallMeter
from prefill.steps import StepLine, StepRunner
from runtime.endings import RankName
from runtime.errors import PeerLostError, TandemError
from runtime.logging import get_logger
from runtime.watchdog import AbandonedError, Watchdog, WatchdogOptions

logger = get_logger(__name__)


AHEAD_POLL_S = 0.0005
"""While the last step runs and nothing else can: so often it is looked at, between commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What does not change while the loop runs; times in seconds.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        push: how layers are grouped for sending.
        name: of the rank, for its last words.
        keep_hidden: send the last hidden state along, for MTP.
        max_ahead: steps that may run while another is launched; 0 on a CPU, which runs one at once.
        enter_thread: called first on the loop's thread.
        idle_s: how often a loop that can run nothing looks at deadlines.
        heartbeat_s: followers hear of us at least so often.
        closure_poll_s: how often followers that owe closures are asked.
        step_limit_s: how long a step of so many tokens may take; 0 for no limit.
        watchdog: how it is noticed that one takes longer.
    """

    max_model_len: int
    push: PushSettings
    name: RankName = field(default_factory=lambda: RankName(instance="prefill"))
    keep_hidden: bool = False
    max_ahead: int = 0
    enter_thread: Callable[[], None] = lambda: None
    idle_s: float = 0.1
    heartbeat_s: float = 1.0
    closure_poll_s: float = 0.005
    step_limit_s: Callable[[int], float] = lambda num_tokens: 0.0
    watchdog: WatchdogOptions = field(default_factory=WatchdogOptions)


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
        lockstep: Lockstep | None = None,
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
            lockstep: the meeting with the other ranks; None for a rank that schedules alone.
            stalls: through which the local sender is called, to be told of each step's end.
            observe_gap: told how long the device idled between two steps, where that is known.
            observe_step: told the tokens and seconds of each step.
            clock: monotonic seconds.
        """
        self._scheduler = scheduler
        self._lockstep = lockstep or SoloLockstep()
        self._senders, self._emit, self._settings = senders, emit, settings
        self._stalls = stalls
        self._clock = clock
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._desk = RequestDesk(
            scheduler, senders, emit, max_model_len=settings.max_model_len, clock=clock
        )
        self._steps = StepLine(
            runner,
            scheduler,
            self._desk,
            senders.local,
            push=settings.push,
            keep_hidden=settings.keep_hidden,
            observe_gap=observe_gap,
            observe_step=observe_step,
            watch=self._watch,
            limit_s=settings.step_limit_s,
            clock=clock,
        )
        # Tokens of the latest steps, each of the rank that has most.
        self._launched = deque([0], maxlen=settings.max_ahead + 1)
        self._pace = IdlePace(clock)
        self._group = GroupState(has_work=False, max_num_tokens=0, all_leaving=False)
        self._stopping = self._is_checked = False
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
        is_busy = self._group.has_work or len(self._steps) > 0
        if self._group.has_work or not self._await_news():
            self._steps.take_over_all_but(self._settings.max_ahead if is_launched else 0)
        if self._stalls:
            self._stalls.end_step()
        self._load = _measure_load(self._scheduler)
        return is_busy

    def take_commands(self, timeout_s: float = 0.0) -> bool:
        """Carry out what is in the queue, waiting at most `timeout_s` for a first; if any was."""
        is_any = False
        try:
            command = self._commands.get(block=timeout_s > 0, timeout=timeout_s or None)
            while not self._is_over:
                is_any = True
                self._apply(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            pass
        if is_any:
            self._desk.expire()
            self._desk.want_tickets()  # what is new need not wait for a step
        return is_any

    def _run(self) -> None:
        error: TandemError | None = None
        try:
            self._settings.enter_thread()
            while not self._is_over:
                busy = self.step()
                self._check_when_idle()
                self.take_commands(0.0 if busy else self._idle_s())
            self._steps.take_over_all_but(0)
            self._senders.stop()
        except AbandonedError:
            return  # the watchdog has ended the loop
        except BaseException as caught:
            if self._stopping and not len(self._desk) and isinstance(caught, PeerLostError):
                logger.info("the other ranks left first")
            else:
                error = reason_of_end(caught, in_group=self._settings.name.num_ranks > 1)
                logger.exception("the engine loop failed")
        self._watchdog.close()
        self._end(error)

    @property
    def _is_over(self) -> bool:
        """In a group a rank that was told to stop goes on until nobody needs it."""
        return self._group.all_leaving if self._lockstep.is_group else self._stopping

    def _idle_s(self) -> float:
        if self._lockstep.is_group:
            return self._pace.wait_s
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

    def _end(self, error: TandemError | None) -> None:
        """Answer everybody; on the loop's thread, or on the watchdog's in its stead."""
        ended = LoopEnded(self._settings.name, error)
        self._desk.fail_all(ended.failure)
        self._emit(ended)

    def _apply(self, command: Command) -> None:
        match command:
            case AddRequest(item):
                self._desk.add(item)
            case CancelRequest(nonce, error):
                self._desk.cancel(nonce, error)
            case TicketClaimed(nonce, grant):
                self._desk.ticket_claimed(nonce, grant)
            case ClaimFailed(nonce, error):
                self._desk.claim_failed(nonce, error)
            case GiveBack(error, also_begun):
                self._desk.give_back(error, also_begun=also_begun)
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
            with self._watch("telling the ranks of a prefill step", max(self._launched)):
                closures = self._senders.announce(chunks, pushes)
            for closed in closures:
                # Not applied in the middle of a step: one of its requests may have failed.
                self._commands.put(closed)

    def _launch_next(self) -> bool:
        self._desk.expire()
        chunks = self._scheduler.schedule()
        self._desk.want_tickets()  # of those behind this step: their claims travel while it runs
        self._group = self._meet(chunks)
        self._desk.open_tickets(chunks)
        pushes = plan_pushes(chunks, self._scheduler.pool.block_size)
        self._announce(chunks, pushes)
        if chunks:
            self._steps.launch(chunks, pushes, num_tokens=self._group.max_num_tokens)
        elif self._group.has_work:
            self._steps.launch_dummy(least=self._group.max_num_tokens)
        else:
            self._steps.launch_nothing()
        return bool(chunks)

    def _meet(self, chunks: Sequence[Chunk]) -> GroupState:
        num_tokens = sum(chunk.scheduled.num_scheduled_tokens for chunk in chunks)
        state = RankState(
            num_tokens=num_tokens, leaving=self._stopping, in_flight=len(self._steps) > 0
        )
        # The others may still run what was launched before.
        with self._watch("the meeting of the ranks before a prefill step", max(self._launched)):
            group = self._lockstep.exchange(state)
        if group.has_work:
            self._launched.append(group.max_num_tokens)
        if group.has_work or group.in_flight:
            self._pace.was_busy()
        return group

    def _await_news(self) -> bool:
        """While the last step runs, let commands in; whether to look for a step before its end.

        Commands may bring one, and in a group another rank may have one. Only for as long as the
        step may take: then its results are waited for, under watch.
        """
        is_group = self._lockstep.is_group
        until = self._clock() + self._pace.wait_s
        while self._steps.is_running and not self._steps.is_late:
            if self.take_commands(AHEAD_POLL_S) or (is_group and self._clock() >= until):
                return True
        return False

    def _watch(self, what: str, num_tokens: int) -> AbstractContextManager[None]:
        """Limit the time of a call that may never return; no request is changed in it."""
        return self._watchdog.watch(what, self._settings.step_limit_s(num_tokens))


def _measure_load(scheduler: Scheduler) -> LoopLoad:
    return LoopLoad(
        num_waiting=len(scheduler.waiting),
        num_claiming=len(scheduler.claiming),
        num_running=len(scheduler.running),
        num_sending=len(scheduler.sending),
        num_tokens_waiting=scheduler.num_tokens_waiting,
        num_free_blocks=scheduler.pool.num_free_blocks,
        num_total_blocks=scheduler.pool.num_usable_blocks,
    )
