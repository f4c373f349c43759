"""The exchange between rank 0 and the other ranks: one broadcast, one gather, both of fixed shape.

Ranks meet here before every step, and now and then when there is none. Rank 0's side is
`LeaderLink`, the others' `FollowerLink`; the messages are those of `prefill.rank_plan`. A rank that
dies breaks the collective for all: the instance is over, and every process of it exits.

Experts that move (`engine.experts.rebalancer`) change their slots here, too: with its answer to a
plan each rank says how its experts stand in the step of that plan, and all conclude the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.experts.votes import ExpertTurns, StandingExperts, conclude
from engine.parallel.groups import RankGroup
from engine.step_error import StepError
from prefill.messages import RankClosed
from prefill.rank_plan import (
    ROW_BYTES,
    BatchArrays,
    PlanKind,
    PlanShape,
    RankAnswer,
    StepPlan,
    decode_plan,
    decode_row,
    encode_plan,
    encode_row,
)
from prefill.sender_group import Answer
from runtime.errors import InternalError


class LeaderLink:
    """Rank 0's side; implements `sender_group.Followers`."""

    def __init__(
        self, group: RankGroup, shape: PlanShape, epoch: int, experts: ExpertTurns | None = None
    ) -> None:
        """Meet in a group; `experts`: this rank's part in moving them, None where they stand."""
        assert group.rank == 0
        self._group, self._experts = group, experts or StandingExperts()
        self._shape = shape
        self._epoch = epoch
        self._step = 0
        self._held: list[RankClosed] = []  # heard where nobody asked for it

    @property
    def num_followers(self) -> int:
        """Ranks besides rank 0."""
        return self._group.size - 1

    def exchange(self, batch: BatchArrays | None, commands: bytes) -> Answer:
        """Send a step, or commands only; return what the ranks say to it.

        A step that one of them cannot run none of them runs.

        Raises:
            PeerLostError: a rank is gone.
            InternalError: a rank is out of step.
            PlacementMismatchError: experts do not stand alike on all ranks.
        """
        size = self._shape.num_command_bytes
        pieces = [commands[start : start + size] for start in range(0, len(commands), size)]
        closed, self._held = self._held, []
        for piece in pieces[:-1]:
            closed += self._send(PlanKind.COMMANDS, None, piece).closed
        kind = PlanKind.COMMANDS if batch is None else PlanKind.STEP
        answer = self._send(kind, batch, pieces[-1] if pieces else b"")
        return Answer([*closed, *answer.closed], answer.refusal)

    def count(self) -> None:
        """Have the other ranks join in adding up their counts (`prefill.group_counter`).

        Raises:
            PeerLostError: a rank is gone.
        """
        self._held += self._send(PlanKind.COUNT, None, b"").closed

    def stop(self) -> None:
        """Have the other ranks leave their loops."""
        self._send(PlanKind.STOP, None, b"")

    def _send(self, kind: PlanKind, batch: BatchArrays | None, commands: bytes) -> Answer:
        self._step += 1
        plan = StepPlan(
            epoch=self._epoch, step=self._step, kind=kind, batch=batch, commands=commands
        )
        self._group.broadcast(torch.from_numpy(encode_plan(plan, self._shape)))
        answers = _gather(self._group, plan, RankAnswer(), self._experts)
        closed = [
            RankClosed(rank, closure)
            for rank, answer in enumerate(answers)
            for closure in answer.closures
        ]
        refusing = [rank for rank, answer in enumerate(answers) if answer.refuses]
        if not refusing:
            return Answer(closed)
        text = f"rank {refusing[0]} cannot prepare it; its log says why"
        return Answer(closed, StepError(text, has_joined=True))


class FollowerLink:
    """The side of any other rank."""

    def __init__(
        self, group: RankGroup, shape: PlanShape, epoch: int, experts: ExpertTurns | None = None
    ) -> None:
        """Meet in a group; `experts`: this rank's part in moving them, None where they stand."""
        assert group.rank > 0
        self._group, self._experts = group, experts or StandingExperts()
        self._shape = shape
        self._epoch = epoch
        self._step = 0

    def exchange(self, answer: Callable[[StepPlan], RankAnswer]) -> bool:
        """Wait for the next plan, and `answer` it; whether every rank runs its batch.

        Raises:
            PeerLostError: a rank is gone, or rank 0 was silent for the group's timeout.
            InternalError: the plan is not the next one of this epoch.
            PlacementMismatchError: experts do not stand alike on all ranks.
        """
        message = torch.zeros(self._shape.nbytes, dtype=torch.uint8)
        plan = decode_plan(self._group.broadcast(message).numpy(), self._shape)
        self._step += 1
        if (plan.epoch, plan.step) != (self._epoch, self._step):
            raise InternalError(
                f"plan {plan.step} of epoch {plan.epoch:x} came in place of {self._step} of "
                f"{self._epoch:x}"
            )
        answers = _gather(self._group, plan, answer(plan), self._experts)
        return not any(other.refuses for other in answers)


def _gather(
    group: RankGroup, plan: StepPlan, own: RankAnswer, experts: ExpertTurns
) -> list[RankAnswer]:
    """What every rank says to a plan, by rank; experts then stand as its step runs."""
    own = replace(own, word=experts.say())
    row = torch.from_numpy(encode_row(plan.epoch, plan.step, own)).view(1, ROW_BYTES)
    rows = group.all_gather(row).numpy()
    answers = [decode_row(other, plan.epoch, plan.step) for other in rows]
    verdict = conclude([answer.word for answer in answers])
    is_run = plan.kind is PlanKind.STEP and not any(answer.refuses for answer in answers)
    experts.hear(verdict, has_work=is_run)
    return answers
