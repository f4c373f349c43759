"""What requests are told when the engine loop of a rank ends, of either role. Decides by the cause
and by whether a request was in a step then; nobody else does. What becomes of an answer is the
router's to decide (`router.requests.pipeline`).

| the loop ends by | a request in a launched step | any other request |
|---|---|---|
| an order to stop | DRAINING | DRAINING |
| the loss of another rank of the group | PEER_LOST | PEER_LOST |
| a step that hangs, in a group | PEER_LOST, a suspect | PEER_LOST |
| a step that hangs, or a device that fails | INTERNAL, a suspect | PEER_LOST |
| anything else | INTERNAL, a suspect | INTERNAL, a suspect |

A rank that lost another one of its group is whole itself, and so are its requests. A step that
hangs in a group waits for another rank as a rule; but a request of the step may be why, as it may
be where a device fails. Whoever was not in the step is no cause of that. What remains is a fault of
ours whose cause nobody knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import (
    DeviceError,
    DrainingError,
    InternalError,
    PeerLostError,
    TandemError,
)
from worker.watchdog import StepOverdueError


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


def failure_of_requests(name: RankName, error: TandemError | None, *, in_step: bool) -> TandemError:
    """What a request that is left is answered with.

    Args:
        name: of the rank.
        error: why its loop ends; None for an orderly end.
        in_step: whether the request is in a step that was launched and not taken over.
    """
    if error is None:
        return DrainingError(f"{name} was told to stop before the request was over")
    may_be_why = in_step or not isinstance(error, DeviceError)
    is_of_group = isinstance(error, StepOverdueError) and name.num_ranks > 1
    if is_of_group or isinstance(error, PeerLostError):
        text = f"{name} cannot go on: {error.message}. {name.fate}"
        return PeerLostError(text, suspect=is_of_group and may_be_why)
    text = f"{name} failed: {error.message}"
    return InternalError(text, suspect=True) if may_be_why else PeerLostError(text)


def refusal_of_calls(name: RankName) -> TandemError:
    """What calls that come after the end are answered with."""
    return DrainingError(f"{name} has ended: use another one")
