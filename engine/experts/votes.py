"""What a rank says of its experts before each step, and what all ranks conclude from it.

Moving experts is a sequence of *turns* that all ranks take together. In a turn each rank votes:
wait, ready, or failed. The words ride on the message that the ranks of a group exchange before each
step anyway (`engine.parallel.lockstep`), and the conclusion is a pure function of all of them, so
ranks that have the same rows decide the same at the same step, without a leader. The key idea:
maps change only between a conclusion and the next message, and that message names the placement in
which its step would run; ranks of unlike placements find out before they run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Final, NamedTuple, Protocol

from runtime.errors import InternalError


class PlacementMismatchError(InternalError):
    """Experts would stand differently on the ranks of one step; the group is over."""


class Vote(IntEnum):
    """What a rank says in a turn."""

    WAIT = 0
    READY = 1
    FAILED = 2


class Verdict(Enum):
    """What all ranks conclude: the turn goes on, all are ready, or all give it up."""

    WAIT = "wait"
    GO = "go"
    RETREAT = "retreat"


class Word(NamedTuple):
    """What one rank says.

    Attributes:
        placement: a number that tells apart the placements that a group has had.
        turn: of how many turns this rank has seen the end.
        vote: in this one.
    """

    placement: int = 0
    turn: int = 0
    vote: Vote = Vote.WAIT


NUM_WORD_FIELDS: Final = len(Word._fields)
NO_WORD: Final = Word()
"""Of a rank whose experts never move."""


class ExpertTurns(Protocol):
    """A rank's part in the turns, called once a step on the engine loop's thread; never waits."""

    def say(self) -> Word:
        """Write maps anew if that is due, and say how experts stand in the step that follows."""
        ...

    def hear(self, verdict: Verdict, *, has_work: bool) -> None:
        """Carry on as all ranks do; `has_work`: whether a step follows."""
        ...


class StandingExperts:
    """See `ExpertTurns`; experts stay where they are."""

    def say(self) -> Word:
        """Nothing to say."""
        return NO_WORD

    def hear(self, verdict: Verdict, *, has_work: bool) -> None:
        """Nothing to do."""


def conclude(words: Sequence[Word]) -> Verdict:
    """Return what all ranks conclude from the words of all of them, in rank order.

    Raises:
        PlacementMismatchError: a rank has missed a flip or a turn.
    """
    first = words[0]
    for rank, word in enumerate(words):
        if word.placement != first.placement or word.turn != first.turn:
            raise PlacementMismatchError(
                f"rank {rank} has experts as in placement {word.placement:016x}, turn {word.turn}; "
                f"rank 0 as in {first.placement:016x}, turn {first.turn}: a rank has missed a flip "
                "of its experts' map. No step may run so; start the instance again"
            )
    votes = [word.vote for word in words]
    if Vote.FAILED in votes:
        return Verdict.RETREAT
    return Verdict.GO if all(vote is Vote.READY for vote in votes) else Verdict.WAIT
