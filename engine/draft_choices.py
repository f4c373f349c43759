"""How many drafts the steps of a rank may verify: always the same, or a few numbers to choose from.

Pure. A row is a token that runs in a step: the last one of a request, and each of its drafts. Where
there is a choice, a size of step has the numbers whose rows there is room for; the fewer requests a
step has, the more of them. So a number that the largest step of a group may take is there for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AUTO_DRAFTS = 3
"""Most drafts of a step, where they are chosen before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChoices:
    """Numbers of drafts of a request and step.

    Attributes:
        numbers: ascending, without repetition; one where there is no choice.
        max_rows: of a step, of one rank; 0 for no limit. The fewest drafts are always there.
    """

    numbers: tuple[int, ...] = (0,)
    max_rows: int = 0

    def __post_init__(self) -> None:
        assert self.numbers, "no number of drafts"
        assert sorted(set(self.numbers)) == list(self.numbers), self.numbers
        assert self.numbers[0] >= 0

    @classmethod
    def always(cls, number: int) -> DraftChoices:
        """Return the choice of one number."""
        return cls(numbers=(number,))

    @classmethod
    def up_to(cls, most: int, *, max_rows: int) -> DraftChoices:
        """Return the choice of every number from none, as far as there is room for their rows."""
        return cls(numbers=tuple(range(most + 1)), max_rows=max_rows)

    @property
    def most(self) -> int:
        """The largest number of all."""
        return self.numbers[-1]

    @property
    def are_open(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.numbers) > 1

    def of(self, size: int) -> tuple[int, ...]:
        """Return the numbers of a step of `size` requests, ascending.

        Args:
            size: of the rank that has most.
        """
        if not self.max_rows:
            return self.numbers
        fitting = [count for count in self.numbers if size * (1 + count) <= self.max_rows]
        return tuple(fitting) or self.numbers[:1]

    def most_rows(self, sizes: Sequence[int]) -> int:
        """Return the most rows of a step of any of these sizes."""
        return max(size * (1 + self.of(size)[-1]) for size in sizes)
