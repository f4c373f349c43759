"""How fast places come free, from those that did: a prediction of waits. Pure."""

from __future__ import annotations

from collections import deque

WINDOW = 64
"""Releases that are remembered."""


class Pace:
    """Places given back, and when."""

    def __init__(self) -> None:
        self._releases: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    def note(self, num_places: int, now: float) -> None:
        """So many places came free."""
        self._releases.append((now, num_places))

    def wait_s(self, num_places: int, now: float) -> float | None:
        """Seconds until so many more have come free; None where too little is known.

        The rate is that of the remembered releases after the first, over the time from the first
        to now: if nothing comes free for long, the prediction grows.
        """
        if len(self._releases) < 2:
            return None
        seconds = now - self._releases[0][0]
        if seconds <= 0.0:
            return 0.0
        num_released = sum(number for _, number in self._releases) - self._releases[0][1]
        return num_places * seconds / num_released
