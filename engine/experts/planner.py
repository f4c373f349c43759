"""Who says which experts are to move: off the engine loop's thread, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from experts.moves import Round


class Planner(Protocol):
    """One rank's. All its methods return at once; ranks call `start` and `recover` alike."""

    def start(self) -> None:
        """Begin to plan, together with the other ranks, from the placement in force."""
        ...

    def is_done(self) -> bool:
        """Whether this rank has the plan.

        Raises:
            TandemError: there will be none.
        """
        ...

    def take(self) -> Sequence[Round]:
        """Return the rounds, the same on all ranks; none where nothing is worth moving."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, so that `start` may follow."""
        ...

    def recover(self) -> None:
        """Drop what is under way, or done and not taken."""
        ...

    def close(self) -> None:
        """End; the ranks may be gone."""
        ...
