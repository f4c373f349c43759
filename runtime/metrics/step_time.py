"""How long a step takes, by its size, learnt from the steps that were run. Pure."""

from __future__ import annotations

from collections import deque

WINDOW = 64
"""Steps that are remembered."""


class StepTime:
    """Least squares over the last steps: seconds = fixed + per_item * size, neither below 0."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._fit: tuple[float, float] | None = None

    def observe(self, size: int, seconds: float) -> None:
        """A step of so many tokens or requests took so long; empty ones say nothing."""
        if size > 0 and seconds > 0.0:
            self._steps.append((float(size), seconds))
            self._fit = None

    @property
    def is_known(self) -> bool:
        """Whether any step was seen."""
        return bool(self._steps)

    @property
    def per_item_s(self) -> float:
        """What one more item adds; 0 where nothing is known."""
        return self._fitted()[1]

    def seconds(self, size: int) -> float:
        """Of a step of so many items; 0 where nothing is known."""
        fixed, per_item = self._fitted()
        return fixed + per_item * size

    def largest_within(self, seconds: float, most: int) -> int:
        """The largest size up to ``most`` of a step that takes no longer; ``most`` if unknown."""
        fixed, per_item = self._fitted()
        if per_item * most + fixed <= seconds:
            return most
        return int((seconds - fixed) / per_item) if per_item and seconds > fixed else 0

    def _fitted(self) -> tuple[float, float]:
        if self._fit is None:
            self._fit = _fit(self._steps)
        return self._fit


def _fit(steps: deque[tuple[float, float]]) -> tuple[float, float]:
    if not steps:
        return 0.0, 0.0
    mean_size = sum(size for size, _ in steps) / len(steps)
    mean_s = sum(seconds for _, seconds in steps) / len(steps)
    spread = sum((size - mean_size) ** 2 for size, _ in steps)
    slope = 0.0
    if spread > 0.0:
        slope = sum((size - mean_size) * (s - mean_s) for size, s in steps) / spread
    else:
        slope = mean_s / mean_size  # all of one size: as if nothing were fixed
    slope = min(max(slope, 0.0), mean_s / mean_size)
    return mean_s - slope * mean_size, slope
