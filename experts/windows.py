"""Windows over the counts of an `ExpertCounter`: what experts got in so many steps.

A step of the rank's group is a pass, also where this rank had nothing in it. Passes are numbered
from the start, and ranks of a group make the same ones, so a window of N passes ends on all of them
where the number is a multiple of N. Windows of different ranks with the same bounds belong
together: whoever has those of all ranks adds them up.

Everybody who wants windows follows them on their own: a recording, the metrics, whoever moves
experts. Readings are copies on the step's stream that nobody waits for; a window is told of when
its copies are there, some passes later. All methods are for the thread that launches steps. The
token path pays nothing but the counting: between the ends of windows `passed` is a comparison.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadWindow:
    """What experts got in the passes [first_pass, end_pass).

    Attributes:
        first_pass: number of the first pass.
        end_pass: number of the pass behind the last one.
        counts_LE: [L, E] int64, tokens of each logical expert, of the layers of the counter.
    """

    first_pass: int
    end_pass: int
    counts_LE: Counts

    @property
    def num_passes(self) -> int:
        """Passes of the window."""
        return self.end_pass - self.first_pass


class Reading(Protocol):
    """The counts behind some step, perhaps still on their way to the host."""

    @property
    def is_done(self) -> bool:
        """Whether `read` would return at once."""
        ...

    def read(self) -> Counts:
        """Wait for the step, and return its counts since the start, [L, E]."""
        ...


class ReadableCounts(Protocol):
    """What grows with every step: an `ExpertCounter`, or those of several ranks together."""

    def start_reading(self) -> Reading:
        """Start to copy the counts out, behind all steps that were launched."""
        ...


TakeWindow = Callable[[LoadWindow], None]


@dataclass(slots=True, eq=False)
class _Follower:
    since: int
    every: int
    take: TakeWindow
    start: tuple[int, Counts] | None = None  # where the window began that has not ended


class LoadWindows:
    """The windows of one rank.

    Attributes:
        counter: whose counts they are.
        num_passes: passes so far.
    """

    def __init__(self, counter: ReadableCounts) -> None:
        self.counter = counter
        self.num_passes = 0
        self._followers: dict[int, _Follower] = {}
        self._next_key = 0
        self._readings: deque[tuple[int, Reading]] = deque()

    @property
    def num_followers(self) -> int:
        """Who follow; without any, nothing is read."""
        return len(self._followers)

    def follow(self, every: int, take: TakeWindow) -> int:
        """Tell of every window of so many passes that begins from now on.

        Args:
            every: passes of a window, at least 1.
            take: told of each on this thread, in order; must not block.

        Returns:
            What `unfollow` takes.
        """
        assert every >= 1, every
        self._next_key += 1
        self._followers[self._next_key] = _Follower(self.num_passes, every, take)
        if self.num_passes % every == 0:
            self._start_reading()
        return self._next_key

    def unfollow(self, key: int) -> None:
        """Tell no more of windows; harmless where that was said before."""
        self._followers.pop(key, None)

    def passed(self) -> None:
        """The group has launched a step: this rank its part of it, or a dummy."""
        self.num_passes += 1
        if self._readings:
            self.deliver()
        for follower in self._followers.values():
            if self.num_passes % follower.every == 0:
                self._start_reading()
                return

    def deliver(self, *, wait: bool = False) -> None:
        """Tell of the windows whose counts are on the host; with `wait`, of all that have ended."""
        while self._readings and (wait or self._readings[0][1].is_done):
            number, reading = self._readings.popleft()
            counts = reading.read()
            for follower in tuple(self._followers.values()):
                if number >= follower.since and number % follower.every == 0:
                    _tell(follower, number, counts)

    def _start_reading(self) -> None:
        if not self._readings or self._readings[-1][0] != self.num_passes:
            self._readings.append((self.num_passes, self.counter.start_reading()))


def _tell(follower: _Follower, number: int, counts: Counts) -> None:
    start, follower.start = follower.start, (number, counts)
    if start is not None:
        window = LoadWindow(first_pass=start[0], end_pass=number, counts_LE=counts - start[1])
        follower.take(window)
