"""The experts of a rank during a measurement: what they get, and what moves them between its steps.

What moves them is a worker's own (`worker.expert_moves`): windows, plans, votes in the message
before a step, canaries. Here is only who looks at it: which turn each step ran beside, and what
experts got, pass by pass, in a stretch before the first plan and in one after its last round. Steps
of these stretches are named as such, because a reading is a copy behind each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.engine.options import DecodeOptions, PrefillOptions
from bench.engine.session import Session
from engine.experts.counted import CountedExperts
from engine.experts.rebalancer import Rebalancer, Stage
from engine.experts.votes import ExpertTurns, StandingExperts, Verdict, Word
from experts.windows import LoadWindow
from kv_transfer.settings import with_resolved_transport
from runtime.net.credentials import Credentials, Listen
from worker.arguments import WorkerOptions
from worker.expert_load import ExpertLoadFeed
from worker.expert_moves import ExpertMoves, open_expert_moves

MOST_PASSES: Final = 64
"""Of a stretch; half of the interval between two plans, where that is less."""

FLIP, RECORDED, BEFORE, AFTER = "flip", "recorded", "before", "after"
"""What a step is called in which maps and slots changed; one behind which counts were read; those
at rest before the first plan and behind its last round. Others have the name of their
`engine.experts.rebalancer.Stage`."""

Table = npt.NDArray[np.int64]


class _Phase(Enum):
    BEFORE = "before"
    MOVING = "moving"
    AFTER = "after"
    REST = "rest"
    DONE = "done"


class Stretch:
    """Passes that were looked at one by one.

    Attributes:
        windows: of this rank, a pass each, in their order.
        table_LP: where experts stood meanwhile.
    """

    def __init__(self, table_LP: Table, first_pass: int, num_passes: int) -> None:
        """Take passes from one on, so many."""
        self.table_LP, self.windows = table_LP, list[LoadWindow]()
        self._first, self._num_passes = first_pass, num_passes

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing more to take."""
        return len(self.windows) >= self._num_passes

    def take(self, window: LoadWindow) -> None:
        """Another pass."""
        if window.first_pass >= self._first and not self.is_whole:
            self.windows.append(window)


class WatchedExperts:
    """See the module. All of it is for the engine loop's thread, but for `close`.

    Attributes:
        experts: of the rank.
        moving: what moves them; None where they stand.
        kinds: what each step of the loop ran beside, from the first one on.
        before: the stretch before the first plan.
        after: the one behind its rounds; None where there was none.
    """

    def __init__(
        self,
        experts: CountedExperts,
        open_moves: Callable[[ExpertLoadFeed], ExpertMoves | None],
        *,
        interval_steps: int,
    ) -> None:
        """Look at nothing before `attach`.

        Args:
            experts: of the rank.
            open_moves: given their windows, returns what moves them, if anything does.
            interval_steps: between two plans.
        """
        self.experts, self.kinds = experts, list[str]()
        self._post: Callable[[Callable[[], None]], None] = lambda work: work()
        self._feed = ExpertLoadFeed(experts, lambda work: self._post(work))
        self.moving = open_moves(self._feed)
        self._num_passes = max(min(MOST_PASSES, interval_steps // 2), 1)
        self._interval_steps = interval_steps
        self.before = Stretch(self._table(), 0, self._num_passes)
        self.after: Stretch | None = None
        self._turns: ExpertTurns = StandingExperts()
        if self.moving is not None:
            self._turns = self.moving.rebalancer
        self._phase, self._key = _Phase.BEFORE, 0
        self._kind, self._num_resting, self._runs_ahead = "", 0, False

    @property
    def rebalancer(self) -> Rebalancer | None:
        """None where experts stand."""
        return None if self.moving is None else self.moving.rebalancer

    @property
    def first_flip(self) -> int | None:
        """The first step of the loop that ran in another placement; None if none did."""
        return self.kinds.index(FLIP) if FLIP in self.kinds else None

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to wait for: all that was planned first is carried out."""
        return self._phase is _Phase.DONE or (
            self.moving is None and self._phase is not _Phase.BEFORE
        )

    def attach(
        self, post: Callable[[Callable[[], None]], None], *, runs_ahead: bool = False
    ) -> None:
        """Begin; see `bench.engine.steps.LoopExperts`."""
        self._post, self._runs_ahead = post, runs_ahead
        post(lambda: self._follow(self.before))
        if self.moving is not None:
            self.moving.follow_load()

    def say(self) -> Word:
        """See `engine.experts.votes.ExpertTurns`.

        What is begun here runs beside the step that runs now, or if none does, the next one. A flip
        lies before the next one.
        """
        mover = self.rebalancer
        if mover is None:
            return self._turns.say()
        stage, epoch = mover.stage, mover.epoch
        word = self._turns.say()
        self._kind = "" if stage is Stage.RESTING else stage.value
        if self._runs_ahead and self._kind:
            if self.kinds[-1:] != [FLIP]:
                self.kinds[-1:] = [self._kind]
            self._kind = ""
        if mover.epoch != epoch:
            self._kind = FLIP
        return word

    def hear(self, verdict: Verdict, *, has_work: bool) -> None:
        """See `engine.experts.votes.ExpertTurns`."""
        self._turns.hear(verdict, has_work=has_work)

    def passed(self) -> None:
        """The group has launched a step."""
        self.kinds.append(self._kind or self._resting())
        self._feed.passed()
        self._carry_on()

    def close(self) -> None:
        """Look at nothing more; all ranks call, after the last step."""
        if self.moving is not None:
            self.moving.close()

    def _resting(self) -> str:
        if self._phase in (_Phase.BEFORE, _Phase.AFTER):
            return RECORDED
        return BEFORE if self._phase is _Phase.MOVING else AFTER

    def _carry_on(self) -> None:
        mover = self.rebalancer
        self._num_resting = self._num_resting + 1 if self._is_settled() else 0
        if self._phase is _Phase.BEFORE and self.before.is_whole:
            self._end(_Phase.MOVING)
        # The last flip is due when resting begins, and is made before the next step.
        elif self._phase is _Phase.MOVING and mover is not None and self._num_resting > 1:
            first = self._feed.windows.num_passes
            self.after = Stretch(self._table(), first, self._num_passes)
            self._phase = _Phase.AFTER
            self._follow(self.after)
        elif self._phase is _Phase.AFTER and self.after is not None and self.after.is_whole:
            self._end(_Phase.REST)
        # As many steps at rest as there were before the first plan.
        elif self._phase is _Phase.REST and not 0 < self._num_resting < self._interval_steps:
            self._phase = _Phase.DONE

    def _is_settled(self) -> bool:
        """Whether nothing moves any more of what was planned first."""
        mover = self.rebalancer
        if mover is None:
            return True
        is_planned = mover.counts.num_rounds > 0 or mover.counts.num_plans > 1
        return mover.stage is Stage.STOPPED or (is_planned and mover.stage is Stage.RESTING)

    def _follow(self, stretch: Stretch) -> None:
        self._key = self._feed.windows.follow(1, stretch.take)

    def _end(self, then: _Phase) -> None:
        self._feed.windows.unfollow(self._key)
        self._phase = then

    def _table(self) -> Table:
        return np.array(self.experts.placements.table, dtype=np.int64)


def watch_experts(
    session: Session, options: PrefillOptions | DecodeOptions, role: str
) -> WatchedExperts | None:
    """Open what looks at a rank's experts, and what moves them; all ranks call.

    Returns:
        None where nothing is counted, or where ranks that share rows count shares of them.
    """
    experts, moves = session.rank.experts, session.rank.moves
    if experts is None or experts.num_ranks == 1 or session.rank.groups.dims.tp > 1:
        return None

    def open_moves(feed: ExpertLoadFeed) -> ExpertMoves | None:
        if moves is None:
            return None
        worker = _worker_options(session, options, role)
        return open_expert_moves(worker, moves, experts, feed, epoch=session.epoch)

    interval = options.section.rebalance_interval_steps
    return WatchedExperts(experts, open_moves, interval_steps=interval)


def _worker_options(
    session: Session, options: PrefillOptions | DecodeOptions, role: str
) -> WorkerOptions:
    """As of a worker whose ranks are on this host."""
    listen = Listen(bind="127.0.0.1")
    return WorkerOptions(
        role=role,
        config=with_resolved_transport(options.cluster, listen.bind),
        instance=f"bench-{role}",
        rank=session.rank.place.rank,
        rendezvous=session.rank.place.rendezvous,
        router="",
        listen=listen,
        credentials=Credentials.of_secret(""),
    )
