"""A token bucket: what may be spent a minute, and at most a minute's worth at once.

Pure: whoever asks says what time it is. It may be overdrawn, by what turned out to cost more than
it was taken for; then nothing is had from it until the debt is paid.
"""

from __future__ import annotations

MINUTE_S = 60.0
_ROUNDING = 1e-6
"""Amounts are whole numbers: who waited as long as it was told must not lack the last bit."""


class TokenBucket:
    """Full at first; fills evenly at ``capacity`` a minute."""

    def __init__(self, capacity: int, now: float) -> None:
        """``capacity`` is 1 or more; ``now`` is of any clock that never goes back, in seconds."""
        assert capacity > 0
        self._capacity = capacity
        self._level = float(capacity)
        self._at = now

    @property
    def capacity(self) -> int:
        """What it holds at most, and gains in a minute."""
        return self._capacity

    def level(self, now: float) -> float:
        """What is in it; below 0 it is overdrawn."""
        gained = max(0.0, now - self._at) * self._capacity / MINUTE_S
        self._level = min(float(self._capacity), self._level + gained)
        self._at = max(self._at, now)
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until ``amount`` is there, or until it is full where that is less; 0: now."""
        missing = min(amount, self._capacity) - self.level(now)
        return missing * MINUTE_S / self._capacity if missing > _ROUNDING else 0.0

    def take(self, amount: float, now: float) -> None:
        """Spend ``amount``, there or not; a negative one is given back, as far as there is room."""
        self._level = min(float(self._capacity), self.level(now) - amount)

    def resize(self, capacity: int, now: float) -> None:
        """Hold ``capacity`` from now on; what it grows by is in it."""
        assert capacity > 0
        grown = max(0, capacity - self._capacity)
        self._level = min(float(capacity), self.level(now) + grown)
        self._capacity = capacity
