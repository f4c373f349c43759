"""Time as every part of a request's path is given it: a named limit, and what its end means.

Nobody computes deadlines by hand. Whoever sets a limit makes a ``Budget``; whoever waits asks it
how much is left, and when it is over raises ``error``. Which error that is follows from the kind
alone, so two parts that watch the same limit can never tell a caller two different things. Pure:
times are seconds of one monotonic clock, which the caller reads. Over a wire goes ``left``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.errors import (
    DeadlineExceededError,
    OverloadedError,
    PeerLostError,
    TandemError,
    TransferFailedError,
)


class BudgetKind(enum.Enum):
    """What a limit bounds."""

    REQUEST = "the request"
    """From a request's arrival to its last token, queues included."""
    FIRST_TOKEN = "the first token"
    """From a request's arrival to its first token, queues included."""
    NEXT_TOKEN = "the next token"
    """Between two tokens, moves to other workers included."""
    QUEUE = "the queue"
    """Until a place is free."""
    TRANSFER = "the KV transfer"
    """From the last sign of computing to complete KV; never computing or a queue."""
    CALL = "the call"
    """One answer of one peer."""


_ERRORS: dict[BudgetKind, type[TandemError]] = {
    # The request's own time: nobody else can do better.
    BudgetKind.REQUEST: DeadlineExceededError,
    BudgetKind.FIRST_TOKEN: DeadlineExceededError,
    BudgetKind.NEXT_TOKEN: DeadlineExceededError,
    # Ours: later, or on another pair, the same request may succeed.
    BudgetKind.QUEUE: OverloadedError,
    BudgetKind.TRANSFER: TransferFailedError,
    BudgetKind.CALL: PeerLostError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A limit that is running.

    Attributes:
        kind: what it bounds, and so which error its end becomes.
        total_s: how long it was when it began.
        until: when it is over, on the clock of whoever holds it.
        setting: the field of the configuration that gave it, for the message; may be empty.
    """

    kind: BudgetKind
    total_s: float
    until: float
    setting: str = ""

    @classmethod
    def start(cls, kind: BudgetKind, total_s: float, now: float, setting: str = "") -> Budget:
        """A limit of ``total_s`` from ``now``."""
        return cls(kind=kind, total_s=total_s, until=now + total_s, setting=setting)

    def left(self, now: float) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.until - now)

    def is_over(self, now: float) -> bool:
        """Whether nothing is left."""
        return now >= self.until

    def restarted(self, now: float) -> Budget:
        """The same limit from ``now``: there was progress."""
        return Budget.start(self.kind, self.total_s, now, self.setting)

    def error(self, phase: str, request_id: str = "") -> TandemError:
        """What a wait that this limit ended has to raise; ``phase`` says what was waited for."""
        setting = f" ({self.setting})" if self.setting else ""
        text = f"{self.total_s:g} s for {self.kind.value}{setting} are over while {phase}"
        return _ERRORS[self.kind](text, request_id=request_id)


def earliest(budgets: Iterable[Budget]) -> Budget:
    """The limit that ends first, of at least one."""
    return min(budgets, key=lambda budget: budget.until)
