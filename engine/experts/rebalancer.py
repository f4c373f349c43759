"""How experts move while steps run: plan, stage, check, flip; on the engine loop's thread.

Life of a move. The ranks go through *turns* together (`engine.experts.votes`), each of which ends
at the same step on all of them:

1. RESTING, for so many steps; nobody asks.
2. PLANNING: threads of all ranks gather what experts had to do, and one of them plans.
3. FREE: every rank's inbox is free, because the flip before was carried out.
4. SENDING: a source packs an expert into its reader's inbox, or where it cannot reach that into its
   own outbox, and sends it from there; or the reader copies it from its host's memory. A piece a
   step.
5. CHECKING: every receiver compares canary and checksum, a piece a step.
6. The flip: before the next step is announced every receiver copies its inbox into the slot, and
   all ranks write their maps anew. Then FREE again for the next round, or RESTING.

One word of failure in 2 to 5 and all retreat at the same step: what is under way is given up, the
placement stays as it is between two rounds, which serves. RECOVERING lasts until nothing of before
can land any more; then there is another try, each time later. Where that fails too the ranks are
STOPPED: they serve on as experts stand, and say so. Nothing here waits: each turn has a deadline,
of this rank's clock, and a rank that passes it votes for all.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from engine.experts.carrier import Carrier
from engine.experts.host_experts import HostExperts
from engine.experts.placements import ExpertPlacements
from engine.experts.planner import Planner
from engine.experts.round_part import RoundPart
from engine.experts.staging import Staging
from engine.experts.votes import Verdict, Vote, Word
from experts.moves import Round
from runtime.errors import TandemError
from runtime.logging import fields, get_logger

logger = get_logger(__name__)

MAX_BACKOFF: Final = 64
"""Times the interval, at most, between two tries after retreats."""


class Stage(Enum):
    """Where the ranks are; see the module."""

    RESTING = "resting"
    PLANNING = "planning"
    FREE = "free"
    SENDING = "sending"
    CHECKING = "checking"
    RECOVERING = "recovering"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceOptions:
    """The same on all ranks of a group.

    Attributes:
        interval_steps: of the group between two plans.
        lag_steps: more than that, until the counts of a window that ends now are on the host.
        turn_timeout_s: seconds that a turn may last before all retreat.
    """

    interval_steps: int
    lag_steps: int = 0
    turn_timeout_s: float = 30.0


@dataclass(slots=True)
class RebalanceCounts:
    """What a rank has seen; read by other threads.

    Attributes:
        num_plans: that were made, those that move nothing included.
        num_rounds: flips of the group.
        num_moves: experts of all ranks that changed their slot.
        num_bytes: received by this rank, and flipped in.
        num_host_moves: of this rank's, that came from its host's memory.
        num_retreats: turns that were given up.
    """

    num_plans: int = 0
    num_rounds: int = 0
    num_moves: int = 0
    num_bytes: int = 0
    num_host_moves: int = 0
    num_retreats: int = 0


class Rebalancer:
    """One rank's part. `say` and `hear` are for the engine loop, once a step; the rest for anybody.

    Attributes:
        counts: so far.
        stage: where the ranks are.
        problem: why experts will not move any more; empty as long as they may.
        last_retreat: why the latest retreat was, as far as this rank knows.
    """

    def __init__(
        self,
        placements: ExpertPlacements,
        staging: Staging,
        carrier: Carrier,
        planner: Planner,
        *,
        rank: int,
        num_ranks: int,
        options: RebalanceOptions,
        host: HostExperts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Rest at first.

        Args:
            placements: of this rank's model, which can change.
            staging: over the weights of that model.
            carrier: between the boxes of `staging` and those of the other ranks.
            planner: of the group.
            rank: of this process in the group that shares experts.
            num_ranks: of that group.
            options: the same on all ranks.
            host: copies of experts in this rank's host memory, of the same layers on all ranks.
            clock: monotonic seconds.
        """
        self._placements, self._staging = placements, staging
        self._carrier, self._planner = carrier, planner
        self._options, self._clock = options, clock
        share = placements.num_physical_experts // num_ranks
        self._part = RoundPart(staging, carrier, rank=rank, share=share, host=host)
        self.counts, self.stage = RebalanceCounts(), Stage.RESTING
        self.problem = self.last_retreat = self._reason = ""
        self._turn, self._epoch = 0, 0
        self._digest = zlib.crc32(repr(placements.table).encode())
        self._ends_at = float("inf")
        self._num_steps, self._backoff = 0, 1
        self._rounds: Iterator[Round] = iter(())  # to come behind this one
        self._round: Round = ()
        self._due: Round | None = None  # concluded, to be flipped in before the next word

    @property
    def epoch(self) -> int:
        """Of how many flips the placement in force is the result."""
        return self._epoch

    def say(self) -> Word:
        """Flip in what is due, do what this turn asks of this rank, and say how far that is.

        Its place is before a step is announced, behind the launch of the one before.
        """
        if self._due is not None:
            self._flip(self._due)
            self._due = None
        vote = self._vote()
        return Word(self._epoch << 32 | self._digest, self._turn, vote)

    def hear(self, verdict: Verdict, *, has_work: bool) -> None:
        """Carry on as all ranks do.

        Args:
            verdict: of the group on this turn.
            has_work: whether a step follows, on all ranks.
        """
        if verdict is Verdict.RETREAT:
            self._retreat()
        elif verdict is Verdict.GO:
            self._advance()
        elif self.stage is Stage.RESTING and has_work:
            self._num_steps += 1
            options = self._options
            if self._num_steps >= options.interval_steps * self._backoff + options.lag_steps:
                self._planner.start()
                self._enter(Stage.PLANNING)

    def close(self) -> None:
        """Plan nothing more; the carrier is its owner's to close."""
        self._planner.close()

    def _vote(self) -> Vote:
        """Do what can be done now; a failure of this rank's becomes a vote for all."""
        if self.stage in (Stage.RESTING, Stage.STOPPED):
            return Vote.WAIT
        try:
            is_ready = self._proceed()
        except TandemError as error:
            return self._failed(f"{self.stage.value}: {error.message}")
        if is_ready:
            return Vote.READY
        if self._clock() >= self._ends_at:
            limit = self._options.turn_timeout_s
            return self._failed(f"{self.stage.value} did not end within {limit:g} s")
        return Vote.WAIT

    def _failed(self, reason: str) -> Vote:
        self._reason = reason
        return Vote.FAILED

    def _proceed(self) -> bool:
        match self.stage:
            case Stage.PLANNING:
                return self._planner.is_done()
            case Stage.FREE:
                return self._staging.is_flipped() and self._carrier.is_ready
            case Stage.SENDING:
                return self._part.send()
            case Stage.CHECKING:
                return self._part.check()
            case _:
                is_quiet = self._staging.is_packed() and self._carrier.is_ready
                return self._planner.is_idle and is_quiet

    def _advance(self) -> None:
        """All ranks are ready."""
        match self.stage:
            case Stage.PLANNING:
                self.counts.num_plans += 1
                self._rounds = iter(self._planner.take())
                self._begin_round()
            case Stage.FREE:
                self._enter(Stage.SENDING)
                self._part.deal(self._round, turn=self._turn)
            case Stage.SENDING:
                self._enter(Stage.CHECKING)
            case Stage.CHECKING:
                self._due = self._round
                self._begin_round()
            case _:
                self._rest()

    def _begin_round(self) -> None:
        self._round = next(self._rounds, ())
        if self._round:
            self._enter(Stage.FREE)
            return
        self._backoff = 1
        self._rest()

    def _rest(self) -> None:
        self._num_steps = 0
        self._enter(Stage.RESTING)

    def _enter(self, stage: Stage) -> None:
        self._turn += 1
        self.stage = stage
        self._ends_at = self._clock() + self._options.turn_timeout_s

    def _retreat(self) -> None:
        """All ranks give up this turn, whichever of them could not end it."""
        given_up, self.stage = self.stage, Stage.RECOVERING
        self.counts.num_retreats += 1
        reason = self.last_retreat = self._reason or "another rank could not end it"
        self._reason = ""
        self._rounds = iter(())
        self._part.drop()
        if given_up is Stage.RECOVERING:
            self.problem = f"experts do not move any more: {reason}"
            logger.error("experts do not move any more %s", fields(reason=reason))
            self._enter(Stage.STOPPED)
            return
        logger.warning(
            "gave up moving experts %s",
            fields(stage=given_up.value, epoch=self._epoch, reason=reason),
        )
        self._backoff = min(2 * self._backoff, MAX_BACKOFF)
        self._planner.recover()
        self._carrier.recover()
        self._enter(Stage.RECOVERING)

    def _flip(self, moves: Round) -> None:
        """Have the next step run in the next placement."""
        self.counts.num_bytes += self._part.flip()
        self.counts.num_host_moves = self._part.num_fetched
        self._placements.move([(move.layer, move.slot, move.expert) for move in moves])
        self._staging.end_flip()
        self._epoch += 1
        told = repr([(move.layer, move.slot, move.expert) for move in moves])
        self._digest = zlib.crc32(told.encode(), self._digest)
        self.counts.num_rounds += 1
        self.counts.num_moves += len(moves)
