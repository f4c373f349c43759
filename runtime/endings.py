"""What requests are told when the engine loop of a rank ends, of either role. Decides by the cause
alone, of which request is asked: whether another rank may still serve it, and what becomes of this
one.

A rank that lost another one of its group is whole itself, and so are its requests; a step that
never ended in a group waits for another rank as a rule. Both are told as the loss of a worker,
after which a router tries elsewhere. What remains is this rank's own fault, and the request may be
its cause. Its error says so, and a router moves each of them once, not again.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import DrainingError, InternalError, PeerLostError, TandemError
from runtime.watchdog import StepOverdueError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankName:
    """How a rank speaks of itself to those whose requests it cannot end.

    Attributes:
        instance: its name.
        rank: of this process.
        num_ranks: of the instance.
    """

    instance: str
    rank: int = 0
    num_ranks: int = 1

    def __str__(self) -> str:
        """For a sentence."""
        return f"{self.instance} rank {self.rank} of {self.num_ranks}"

    @property
    def fate(self) -> str:
        """What becomes of the rank and those beside it."""
        return f"{self.instance} ends with all its ranks, and starts again where it is supervised"


def failure_of_requests(name: RankName, error: TandemError | None) -> TandemError:
    """What requests that are left are answered with.

    Args:
        name: of the rank.
        error: why its loop ends; None for an orderly end.
    """
    if error is None:
        return DrainingError(f"{name} was told to stop before the request was over")
    is_of_group = isinstance(error, StepOverdueError) and name.num_ranks > 1
    if is_of_group or isinstance(error, PeerLostError):
        return PeerLostError(f"{name} cannot go on: {error.message}. {name.fate}")
    return InternalError(f"{name} failed: {error.message}", worker_ended=True)


def refusal_of_calls(name: RankName) -> TandemError:
    """What calls that come after the end are answered with."""
    return DrainingError(f"{name} has ended: use another one")
