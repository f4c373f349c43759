"""Time as leases count it: it stands still while nobody could have renewed one.

A process that was stopped, starved of its core or busy with one long callback reads no renewals
meanwhile. On its return all leases would seem to have run out, although no worker was silent.
"""

from __future__ import annotations

from collections.abc import Callable


class LeaseClock:
    """Seconds in which this process was awake, told by ticks that should come at an interval.

    From one tick to the next at most an interval passes; what a tick is late by does not count.
    """

    def __init__(self, clock: Callable[[], float], interval_s: float) -> None:
        """``clock`` gives seconds that never go back."""
        self._clock = clock
        self._interval_s = interval_s
        self._ticked_at = clock()
        self._awake_s = 0.0

    @property
    def interval_s(self) -> float:
        """Seconds between two ticks."""
        return self._interval_s

    def now(self) -> float:
        """Awake seconds so far; right also before the tick that a stall has made late."""
        return self._awake_s + min(self._clock() - self._ticked_at, self._interval_s)

    def tick(self) -> float:
        """Begin the next interval; returns the seconds that this tick is late by."""
        late_s = self._clock() - self._ticked_at - self._interval_s
        self._awake_s = self.now()
        self._ticked_at = self._clock()
        return max(0.0, late_s)
