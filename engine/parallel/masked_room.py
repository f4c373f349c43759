"""How much room a dispatcher of the masked layout gives an expert: for whoever compiles ahead."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class MaskedRoom:
    """Sizes of `MaskedRows` in a step.

    Attributes:
        max_rows: M, of each expert.
        expected_rows: what the host guesses that an expert gets.
    """

    max_rows: int
    expected_rows: int


@runtime_checkable
class MaskingDispatcher(Protocol):
    """A dispatcher whose experts are given `MaskedRows`."""

    def masked_room(self, num_tokens: int, top_k: int) -> MaskedRoom:
        """Return the sizes of a step to which this rank brings so many tokens."""
        ...
