"""How long a step takes by its size and its number of drafts: measured ahead, and as steps go.

Pure. The table that a rank begins with is measured at its start, where it can be, and shared by all
ranks. What steps take later differs: contexts are longer, a GPU at its power limit is slower. So
each entry has a factor to the table, which follows the steps that were run.

Of a size one number of drafts is run nearly always, and choosing needs the others' costs as well.
What makes its steps slower makes theirs slower, and how numbers compare changes little. A factor is
therefore the sum of a part that the numbers share and that moves, and of one of its own that was
unknown once and hardly moves: a Kalman filter tells which of the two a step's time speaks of. A
factor that followed its own steps alone would make whatever runs look dearer than what does not
whenever the device slows down.

Every rank that hears of the same steps in the same order has the same costs: sums, products and
square roots round alike on every host.

Legend: a size is the number of requests of a step, rounded up to one that is captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt

STEP_NOISE = 0.02
"""Of a step's time: its deviation, as a share. So are the others."""
TABLE_ERROR = 0.1
"""Of how the table compares a number of a size with the next one."""
SIZE_ERROR = 0.05
"""Of the factor of a size by that of another one."""
SHARED_WALK = 0.003
"""Of what all numbers of a size share, from one step to the next."""
OWN_WALK = 0.0005
"""Of how they compare, the same."""
LATE = 5.0
"""Deviations from what is expected of a step: beyond, it is the host that was late."""
LEAST_LATE, MOST_LATE = 0.25, 1.0
"""A share of a step's time that is less, or more, than so many deviations in any case."""
_FIXED_ROWS = 8.0
"""Rows that cost what a step does that has none, where nothing was measured."""
_RUN_OF_LAYER = 1.3
"""What a run of the layer that drafts costs, its projection and head included, in layers."""

Costs = Mapping[int, Sequence[float]]
"""Seconds by size, and by number of drafts from 0; of the numbers that the size has."""


def imagined_costs(sizes: Sequence[int], numbers: Mapping[int, int], num_layers: int) -> Costs:
    """Return costs, in no unit, for where nothing was measured: rows cost alike.

    The layer that drafts runs once over all rows of a step, and once over a row of each request for
    every further draft.

    Args:
        sizes: ascending.
        numbers: the most drafts of each size.
        num_layers: of the model, of which one more drafts.
    """
    share = _RUN_OF_LAYER / num_layers
    costs: dict[int, list[float]] = {}
    for size in sizes:
        alone = _FIXED_ROWS + size
        verifying = [_FIXED_ROWS + size * (1 + count) for count in range(1, numbers[size] + 1)]
        drafted = [
            rows + share * (rows + further * alone) for further, rows in enumerate(verifying)
        ]
        costs[size] = [alone, *drafted]
    return costs


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
        self._factors: dict[int, _Factors] = {}
        self._latest: float | None = None

    def of(self, size: int) -> list[float]:
        """Return the seconds of a step of a size, by its number of drafts from 0."""
        row, known = self._table[size], self._factors.get(size)
        if known is None:
            # Of this size nothing was run yet: as much slower or faster as other sizes are.
            base = 1.0 if self._latest is None else self._latest
            return [cost * base for cost in row]
        return [cost * factor for cost, factor in zip(row, known.values, strict=True)]

    def observe(self, size: int, num_drafts: int, seconds: float) -> None:
        """A step of this size and number of drafts took so long."""
        row = self._table[size]
        factor = seconds / row[num_drafts]
        known = self._factors.get(size)
        if known is None:
            is_first = self._latest is None
            known = self._factors[size] = _Factors(
                len(row),
                value=factor if is_first else self._latest or factor,
                error=STEP_NOISE if is_first else SIZE_ERROR,
            )
        known.observe(num_drafts, factor)
        self._latest = known.values[num_drafts]


class _Factors:
    """Factors of one size to the table, and the covariance of their errors, as shares of them.

    Attributes:
        values: by number of drafts.
    """

    def __init__(self, count: int, *, value: float, error: float) -> None:
        """Take all to be `value`, which is wrong by `error`; the table's errors come on top."""
        self.values = [value] * count
        self._errors = [[0.0] * count for _ in range(count)]
        self._grow(error, TABLE_ERROR)

    def observe(self, place: int, factor: float) -> None:
        """A step of this number of drafts has had this factor."""
        self._grow(SHARED_WALK, OWN_WALK)
        seen = list(self._errors[place])
        total = seen[place] + STEP_NOISE * STEP_NOISE
        late = min(max(LATE * sqrt(total), LEAST_LATE), MOST_LATE)
        news = min(max(factor / self.values[place], 1 / (1 + late)), 1 + late) - 1
        for one, row in enumerate(self._errors):
            gain = seen[one] / total
            self.values[one] *= 1 + gain * news
            for other in range(len(row)):
                row[other] -= gain * seen[other]

    def _grow(self, shared: float, own: float) -> None:
        """Add an error that all have, and one of each number's comparison with the one before.

        What was wrong between two numbers is so for all larger ones: where one draft costs more
        than the table says, two do.
        """
        for one, row in enumerate(self._errors):
            for other in range(len(row)):
                row[other] += shared * shared + own * own * min(one, other)
