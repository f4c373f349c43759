"""How long a step takes by its size and its number of drafts: measured ahead, and as steps go.

Pure. The table that a rank begins with is measured at its start, where it can be, and shared by all
ranks. What steps take later differs: contexts are longer, a GPU at its power limit is slower. So
each entry has a factor that follows the steps that were run, and an entry that was not run for a
while drifts to the factor of its neighbours of the same size: then the table decides how they
compare. Every rank that hears of the same steps in the same order has the same costs.

Legend: a size is the number of requests of a step, rounded up to one that is captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

FOLLOWS = 0.1
"""How much of the difference a step's time moves its entry."""
DRIFTS = 0.005
"""How much of the difference it moves the others of its size."""
MOST_FACTOR = 2.0
"""Of a step's time and its entry: beyond, it is the host that was late."""
_FIXED_ROWS = 8.0
"""Rows that cost what a step does that has none, where nothing was measured."""
_LAYER_SHARE = 0.03
"""Of a step: a run of the layer that drafts."""

Costs = Mapping[int, Sequence[float]]
"""Seconds by size, and by number of drafts from 0; of the numbers that the size has."""


def imagined_costs(sizes: Sequence[int], numbers: Mapping[int, int]) -> Costs:
    """Return costs, in no unit, for where nothing was measured: rows cost alike.

    Args:
        sizes: ascending.
        numbers: the most drafts of each size.
    """
    return {
        size: [
            (_FIXED_ROWS + size * (1 + count)) * (1 + _LAYER_SHARE * count)
            for count in range(numbers[size] + 1)
        ]
        for size in sizes
    }


def typical(samples: Sequence[float]) -> float:
    """Return the seconds of a step that was run a few times: the first one warms up."""
    return median(samples[1:] or samples)


def monotone(costs: Costs) -> dict[int, list[float]]:
    """Return costs that never fall from a size or a number of drafts to the next larger one."""
    rising: dict[int, list[float]] = {}
    before: list[float] = []
    for size in sorted(costs):
        row: list[float] = []
        for count, cost in enumerate(costs[size]):
            least = max(row[-1:] + before[count : count + 1], default=0.0)
            row.append(max(cost, least))
        rising[size] = before = row
    return rising


class StepCosts:
    """The costs of one rank's group; the same on all its ranks."""

    def __init__(self, costs: Costs) -> None:
        """`costs` may be of any unit: the factors find it."""
        self._table = monotone(costs)
        self._factors: dict[int, list[float]] = {}
        self._num_seen: dict[tuple[int, int], int] = {}
        self._latest: float | None = None

    def of(self, size: int) -> list[float]:
        """Return the seconds of a step of a size, by its number of drafts from 0."""
        base = 1.0 if self._latest is None else self._latest
        factors = self._factors.get(size, [base] * len(self._table[size]))
        return [cost * factor for cost, factor in zip(self._table[size], factors, strict=True)]

    def observe(self, size: int, num_drafts: int, seconds: float) -> None:
        """A step of this size and number of drafts took so long."""
        row = self._table[size]
        factor = seconds / row[num_drafts]
        known = self._factors.get(size)
        if known is None:
            # Of this size nothing was run yet: as much slower or faster as other sizes are.
            known = self._factors[size] = [self._latest or factor] * len(row)
        old = known[num_drafts]
        new = min(max(factor, old / MOST_FACTOR), old * MOST_FACTOR)
        # The first steps say more than the table, which was made before there were requests.
        num_seen = self._num_seen[size, num_drafts] = self._num_seen.get((size, num_drafts), 0) + 1
        known[num_drafts] += max(FOLLOWS, 1 / num_seen) * (new - old)
        for count in range(len(row)):
            if count != num_drafts:
                known[count] += DRIFTS * (known[num_drafts] - known[count])
        self._latest = known[num_drafts]
