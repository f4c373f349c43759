"""The engine loop: schedule, announce, execute, postprocess, on a thread of its own.

The only thread that touches the scheduler, the block pool and the requests in them. It never
waits for the network: the asyncio side and the sender's threads put commands into its queue, and
it answers with events. With nothing to run it sleeps on that queue. Followers, if there are any,
are told of every step, and hear something now and then when there is none.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from runtime.logging import get_logger

logger = get_logger(__name__)


class StepRunner(Protocol):
    """The part of `engine.runner.ModelRunner` that the loop uses."""

    def execute(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        on_layer_done: Callable[[int], None] | None = None,
        keep_hidden: bool = False,
    ) -> list[StepResult]:
        """Run one step; one result per scheduled request, in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What does not change while the loop runs; times in seconds.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        push: how layers are grouped for sending.
        keep_hidden: send the last hidden state along, for MTP.
        idle_s: how often a loop that can run nothing looks at deadlines.
        heartbeat_s: followers hear of us at least so often.
        closure_poll_s: how often followers that owe closures are asked.
    """

    max_model_len: int
    push: PushSettings
    keep_hidden: bool = False
    idle_s: float = 0.1
    heartbeat_s: float = 1.0
    closure_poll_s: float = 0.005


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
            clock: monotonic seconds.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._senders = senders
        self._emit = emit
        self._settings = settings
        self._stalls = stalls
        self._clock = clock
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._desk = RequestDesk(
            scheduler, senders, emit, max_model_len=settings.max_model_len, clock=clock
        )
        self._stopping = False
        self._is_checked = False
        self._last_exchange = 0.0
        self._load = self._measure_load()
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
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Enqueue a command; commands are taken between steps, in order."""
        self._commands.put(command)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread's end; whether it has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def step(self) -> bool:
        """Run one step if there is something to run; whether there was."""
        self._desk.expire()
        chunks = self._scheduler.schedule()
        self._desk.open_tickets(chunks)
        pushes = plan_pushes(chunks, self._scheduler.pool.block_size)
        self._announce(chunks, pushes)
        if chunks:
            self._postprocess(chunks, self._execute(chunks, pushes))
        if self._stalls:
            self._stalls.end_step()
        self._load = self._measure_load()
        return bool(chunks)

    def take_commands(self, timeout_s: float = 0.0) -> None:
        """Carry out what is in the queue, waiting at most `timeout_s` for a first command."""
        try:
            command = self._commands.get(block=timeout_s > 0, timeout=timeout_s or None)
            while not self._stopping:
                self._apply(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while not self._stopping:
                busy = self.step()
                self._check_when_idle()
                self.take_commands(0.0 if busy else self._idle_s())
            self._senders.stop()
        except BaseException as caught:
            error = caught
            logger.exception("the engine loop failed")
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
            for closed in self._senders.announce(chunks, pushes):
                # Not applied in the middle of a step: one of its requests may have failed.
                self._commands.put(closed)

    def _execute(self, chunks: Sequence[Chunk], pushes: Sequence[PushBlocks]) -> list[StepResult]:
        started = self._clock()
        pusher = StepPusher(self._senders.local, pushes, self._settings.push)
        results = self._runner.execute(
            [chunk.scheduled for chunk in chunks],
            on_layer_done=pusher.on_layer_done,
            keep_hidden=self._settings.keep_hidden,
        )
        pusher.finish()
        duration = self._clock() - started
        for chunk in chunks:
            chunk.item.compute_s += duration
        return results

    def _postprocess(self, chunks: Sequence[Chunk], results: Sequence[StepResult]) -> None:
        for chunk, result in zip(chunks, results, strict=True):
            self._scheduler.advance(chunk)
            chunk.item.prompt_logprobs += result.prompt_logprobs
            if result.is_failed:
                self._desk.fail(chunk.item)
            elif result.sampled is not None:
                self._desk.complete(chunk.item, result)

    def _measure_load(self) -> LoopLoad:
        scheduler = self._scheduler
        return LoopLoad(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_sending=len(scheduler.sending),
            num_tokens_waiting=scheduler.num_tokens_waiting,
            num_free_blocks=scheduler.pool.num_free_blocks,
            num_total_blocks=scheduler.pool.num_usable_blocks,
        )
