"""How long to sleep between two polls of a library that cannot wake us.

Short while something has just happened, longer the longer nothing does: a transfer of a millisecond
is noticed within tens of microseconds, and one of a second costs no more than a thousand polls.
"""

from __future__ import annotations

import ctypes
import time

_PR_SET_TIMERSLACK = 29
_STEPS = ((0.003, 20e-6), (0.05, 200e-6))
"""(seconds since the last progress, pause in seconds)"""
_LONGEST_PAUSE_S = 1e-3


class Pacer:
    """Belongs to the thread that makes it, whose timer slack it sets to a microsecond (the default
    of 50 would triple the shortest pause).
    """

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
        self._last_progress = time.monotonic()

    def progressed(self) -> None:
        """Something happened: poll often."""
        self._last_progress = time.monotonic()

    def pause(self) -> None:
        """Sleep until the next poll is due."""
        quiet_s = time.monotonic() - self._last_progress
        for limit_s, pause_s in _STEPS:
            if quiet_s < limit_s:
                time.sleep(pause_s)
                return
        time.sleep(_LONGEST_PAUSE_S)
