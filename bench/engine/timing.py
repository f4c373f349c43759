"""When steps ended, and what follows from it: tokens over elapsed time, distances of steps.

The key idea: every moment is the end of a step, so a rate is a number of whole steps over the time
that they took, nothing is cut at either end, and no time is counted twice or not at all. On a GPU
the moments are the device's own events: the host may come to read a step late, because it was busy
with the launch of the next.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, Self

MIN_WARM_UPS = 3
"""Steps before the measured ones, at least."""
MIN_STEPS = 2
"""Measured steps, at least."""
MOST_TIMES = 12
"""As long as was asked, at most, where something is waited for."""


class Span(Protocol):
    """When a device ran a step; `engine.device_span.DeviceSpan`."""

    def ended_after(self, before: Self) -> float:
        """Seconds from the end of ``before`` to our end."""
        ...


class StepClock:
    """Tells when steps ended, in seconds after the first one; they are taken in order.

    A step without a span ended when its launch did: a CPU runs it there.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._launched: deque[tuple[Span | None, float]] = deque()
        self._last: Span | None = None
        self._moment: float | None = None
        self._origin = 0.0

    def launched(self, span: Span | None) -> None:
        """A step was launched; called right after."""
        self._launched.append((span, self._clock()))

    def take(self) -> float:
        """When the oldest step that was not taken ended; it must be over."""
        span, now = self._launched.popleft()
        if self._moment is None:
            self._origin, self._moment = now, 0.0
        elif span is None or self._last is None:
            self._moment = now - self._origin
        else:
            self._moment += span.ended_after(self._last)
        self._last = span
        return self._moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Steps that followed each other.

    Attributes:
        first_step: its number, among all that ended, from 0.
        seconds: from the end of the step before the first of them to the end of the last.
        step_s: seconds of each, from the end of the one before to its own.
        idle_s: that the device idled right before each, where that is known.
        mean_context: positions that a request attended to, in the mean over requests and steps; 0
            where this rank had none.
        tokens_each: that a step gave a request, in the same mean.
    """

    first_step: int = 0
    seconds: float
    step_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    mean_context: float
    tokens_each: float

    @property
    def num_steps(self) -> int:
        """How many."""
        return len(self.step_s)

    def per_s(self, count: float) -> float:
        """The rate of something of which every step brings ``count``."""
        return count * self.num_steps / self.seconds


class StepTimes:
    """Gathers the ends of steps: those of the warm-up, then for at least so long the measured ones.

    One thread adds; `began` and `enough` are for any.
    """

    def __init__(
        self,
        *,
        warm_up_s: float,
        seconds: float,
        min_steps: int = MIN_STEPS,
        is_over: Callable[[], bool] = lambda: True,
    ) -> None:
        """Gather.

        Args:
            warm_up_s: seconds of steps that are not measured, at least.
            seconds: of steps that are.
            min_steps: of these, at least.
            is_over: whether all has come that steps are measured for; asked on the thread that
                adds, and waited for up to `MOST_TIMES` as long.
        """
        self._warm_up_s, self._seconds, self._is_over = warm_up_s, seconds, is_over
        self._min_steps = max(min_steps, MIN_STEPS)
        self._first: float | None = None
        self._num_warm_ups = 0
        self._moments: list[float] = []
        self._idle: list[float] = []
        self._num_requests = self._num_positions = self._num_tokens = 0
        self.began = threading.Event()
        """The warm-up is over."""
        self.enough = threading.Event()
        """What was gathered suffices; more does no harm."""

    def add(
        self,
        moment: float,
        *,
        idle_s: float | None = None,
        num_requests: int = 0,
        num_positions: int = 0,
        num_tokens: int = 0,
    ) -> None:
        """A step ended.

        Args:
            moment: when.
            idle_s: how long the device idled before it, if known.
            num_requests: of the step.
            num_positions: that they attended to, together.
            num_tokens: that it gave them, together.
        """
        if not self._moments:
            self._warm_up(moment)
            return
        self._moments.append(moment)
        self._num_requests += num_requests
        self._num_positions += num_positions
        self._num_tokens += num_tokens
        if idle_s is not None:
            self._idle.append(idle_s)
        lasted = moment - self._moments[0]
        is_long = lasted >= self._seconds and len(self._moments) > self._min_steps
        if is_long and (self._is_over() or lasted >= MOST_TIMES * self._seconds):
            self.enough.set()

    def result(self) -> Measurement:
        """What was measured; only once it is `enough`."""
        assert self.enough.is_set(), "too few steps were measured"
        distances = tuple(after - before for before, after in pairwise(self._moments))
        return Measurement(
            first_step=self._num_warm_ups,
            seconds=self._moments[-1] - self._moments[0],
            step_s=distances,
            idle_s=tuple(self._idle),
            mean_context=self._num_positions / max(self._num_requests, 1),
            tokens_each=self._num_tokens / max(self._num_requests, 1),
        )

    def _warm_up(self, moment: float) -> None:
        if self._first is None:
            self._first = moment
        self._num_warm_ups += 1
        if self._num_warm_ups >= MIN_WARM_UPS and moment - self._first >= self._warm_up_s:
            self._moments.append(moment)
            self.began.set()
