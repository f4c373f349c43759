"""How long a pass takes lately: the median of the times between two that follow each other.

A pause between requests is one long time among many, so the median is that of passes behind one
another as long as most are. One thread tells of passes, any may ask.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Final

_KEPT: Final = 256
_LEAST: Final = 16
"""Below it nothing is said: the first passes of a process are slower than those that follow."""


class PassClock:
    """See the module."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._latest: float | None = None
        self._gaps: deque[float] = deque(maxlen=_KEPT)

    def passed(self) -> None:
        """A pass was launched."""
        now = self._clock()
        if self._latest is not None:
            self._gaps.append(now - self._latest)
        self._latest = now

    def pass_s(self) -> float | None:
        """Return the seconds of a pass; None before there were enough."""
        gaps = self._gaps.copy()  # one call into the interpreter: nobody appends meanwhile
        return statistics.median(gaps) if len(gaps) >= _LEAST else None
