"""Steps that are launched and not read yet: launch, wait, take over. Belongs to the loop's thread.

What a step finds out is booked when it is taken over, in the order of the launches: computed tokens
become findable, requests whose prompt is complete get their first token, requests that ended
meanwhile let go of their blocks. `prefill.loop` decides when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from engine.request import ScheduledRequest
from engine.runner import StepResult
from prefill.commands import PushBlocks
from prefill.kv_push import BlockSender, PushSettings, StepPusher
from prefill.request import Chunk
from prefill.request_desk import RequestDesk
from prefill.scheduler import Scheduler
from runtime.lifecycle import PrefillStatus


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

    def run_dummy(self, *, least: int = 0) -> None:
        """Launch our part in the other ranks' step without a request of our own."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaunchedStep:
    """Its chunks are in flight; `follows` a step directly, so that idling in between is a loss."""

    chunks: Sequence[Chunk]
    pending: PendingStep
    launched_at: float
    follows: bool
    num_tokens: int
    """Of the rank that has most: the others wait for it in every layer."""


class StepLine:
    """The steps in flight, oldest first; `len` counts those whose results are not read."""

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        desk: RequestDesk,
        sender: BlockSender,
        *,
        push: PushSettings,
        keep_hidden: bool,
        observe_gap: Callable[[float], None],
        observe_step: Callable[[int, float], None],
        watch: Callable[[str, int], AbstractContextManager[None]],
        limit_s: Callable[[int], float],
        clock: Callable[[], float],
    ) -> None:
        """Start with none; see `prefill.loop.EngineLoop` for the arguments.

        `watch` limits the time of a call by the tokens of its step, to `limit_s` of them.
        """
        self._watch = watch
        self._limit_s = limit_s
        self._runner = runner
        self._scheduler = scheduler
        self._desk = desk
        self._sender = sender
        self._push = push
        self._keep_hidden = keep_hidden
        self._observe_gap = observe_gap
        self._observe_step = observe_step
        self._clock = clock
        self._steps: deque[_LaunchedStep] = deque()
        self._is_following = False  # the latest turn launched something
        self._taken_over_at = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_running(self) -> bool:
        """Whether taking all of them over would have to wait."""
        return bool(self._steps) and not self._steps[-1].pending.is_done

    @property
    def is_late(self) -> bool:
        """Whether the latest step has taken longer than it may."""
        step = self._steps[-1]
        limit_s = self._limit_s(step.num_tokens) or float("inf")
        return self._clock() >= step.launched_at + limit_s

    def launch(
        self, chunks: Sequence[Chunk], pushes: Sequence[PushBlocks], *, num_tokens: int
    ) -> None:
        """Issue a step, and what it completes to the sender.

        Args:
            chunks: of this rank.
            pushes: what they complete.
            num_tokens: of the rank that has most.
        """
        launched_at = self._clock()
        pusher = StepPusher(self._sender, pushes, self._push)
        with self._watch("the launch of a prefill step", num_tokens):
            pending = self._runner.launch(
                [chunk.scheduled for chunk in chunks],
                on_layer_done=pusher.on_layer_done,
                keep_hidden=self._keep_hidden,
            )
        pusher.finish()
        step = _LaunchedStep(
            chunks=chunks,
            pending=pending,
            launched_at=launched_at,
            follows=self._is_following,
            num_tokens=num_tokens,
        )
        self._steps.append(step)
        self._is_following = True

    def launch_dummy(self, *, least: int) -> None:
        """Issue our part in the other ranks' step, of which nothing is to be read."""
        with self._watch("the launch of a prefill step", least):
            self._runner.run_dummy(least=least)
        self._is_following = True

    def launch_nothing(self) -> None:
        """Note a turn in which nothing was to be launched."""
        self._is_following = False

    def take_over_all_but(self, num_steps: int) -> None:
        """Wait for the ends of the oldest steps, and carry on with their requests."""
        while len(self._steps) > num_steps:
            self._take_over(self._steps.popleft())

    def _take_over(self, step: _LaunchedStep) -> None:
        with self._watch("a prefill step", step.num_tokens):
            results = step.pending.collect()
        now = self._clock()
        duration = now - max(step.launched_at, self._taken_over_at)
        self._taken_over_at = now
        own = sum(chunk.scheduled.num_scheduled_tokens for chunk in step.chunks)
        self._observe_step(own, duration)
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
