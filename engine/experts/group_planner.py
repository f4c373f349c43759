"""Plans of a group: what the experts of all ranks got is added up, and rank 0 plans for all.

On a thread of its own (`engine.experts.side_thread`), with collectives of a group of its own. A
rank that cannot bring its part says so instead, so that nobody waits for it: then there is no plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from engine.experts.placements import ExpertPlacements
from engine.experts.side_thread import SideThread, gather_bytes
from engine.parallel.groups import RankGroup
from experts.moves import Round
from experts.told_rounds import ToldRounds
from experts.windows import LoadWindow
from runtime.errors import InternalError
from runtime.logging import fields, get_logger

logger = get_logger(__name__)

Numbers = npt.NDArray[np.int64]
MakePlan = Callable[[LoadWindow, Numbers], Sequence[Round]]
"""Plans from what experts got on all ranks [L, E], and the expert of every slot now [L, P]; no
round where nothing is worth moving. On rank 0 alone; any exception is a plan that is not there."""


_NO_SHARE: Final = LoadWindow(first_pass=0, end_pass=0, counts_LE=np.zeros((0, 0), np.int64))
"""Of a rank whose rows another one counts."""


class GroupPlanner:
    """See `engine.experts.planner.Planner`. `take_window` is for the engine loop's thread too."""

    def __init__(
        self,
        group: RankGroup,
        side: SideThread,
        placements: ExpertPlacements,
        make_plan: MakePlan,
        *,
        is_told: bool = True,
    ) -> None:
        """Wait for windows.

        Args:
            group: of the ranks, for this thread alone.
            side: where all of it runs, in the same order on all ranks.
            placements: of this rank.
            make_plan: called on rank 0.
            is_told: whether this rank gets windows; False where those of another are of its share,
                too.
        """
        self._is_told = is_told
        self._group, self._side = group, side
        self._placements, self._make_plan = placements, make_plan
        self._window: LoadWindow | None = None
        self._making: Future[Sequence[Round]] | None = None

    def take_window(self, window: LoadWindow) -> None:
        """The latest of this rank; plans are made of it alone."""
        self._window = window

    def start(self) -> None:
        """See `Planner`."""
        table = np.array(self._placements.table, dtype=np.int64)
        window, self._window = self._window if self._is_told else _NO_SHARE, None
        self._making = self._side.submit(partial(self._plan, window, table))

    def is_done(self) -> bool:
        """See `Planner`."""
        if self._making is None or not self._making.done():
            return False
        self._making.result()
        return True

    def take(self) -> Sequence[Round]:
        """See `Planner`."""
        assert self._making is not None
        making, self._making = self._making, None
        return making.result()

    @property
    def is_idle(self) -> bool:
        """See `Planner`."""
        return self._making is None or self._making.done()

    def recover(self) -> None:
        """See `Planner`; what is under way ends by itself, by the time limit of its group."""

    def close(self) -> None:
        """See `Planner`."""
        self._side.close()

    def _plan(self, window: LoadWindow | None, table_LP: Numbers) -> Sequence[Round]:
        """Gather the windows of all ranks, have rank 0 plan, and take its plan."""
        windows = gather_bytes(self._group, b"" if window is None else _encode_window(window))
        told = b""
        if self._group.rank == 0:
            told = self._told(windows, table_LP)
        problem, _, rounds = gather_bytes(self._group, told)[0].partition(b"\n")
        if problem:
            raise InternalError(f"no plan was made: {json.loads(problem)}")
        return ToldRounds(rounds)

    def _told(self, windows: Sequence[bytes], table_LP: Numbers) -> bytes:
        """Return what rank 0 tells the others: why there is no plan, or a line behind it rounds."""
        if not all(windows):
            return b"\n"  # too early: no window has ended
        try:
            rounds = ToldRounds.of(self._make_plan(_sum(windows), table_LP))
        except Exception as error:
            logger.exception("experts could not be planned")
            return json.dumps(f"{type(error).__name__}: {error}").encode()
        facts = fields(num_rounds=len(rounds), num_moves=rounds.num_moves)
        logger.info("planned the moves of experts %s", facts)
        return b"\n" + rounds.encoded


def _encode_window(window: LoadWindow) -> bytes:
    counts = np.ascontiguousarray(window.counts_LE, dtype=np.int64)
    header = np.array([window.first_pass, window.end_pass, *counts.shape], dtype=np.int64)
    return header.tobytes() + counts.tobytes()


def _sum(windows: Sequence[bytes]) -> LoadWindow:
    """Add up windows; those of ranks that differ by a pass are the same load for a plan."""
    numbers = [np.frombuffer(window, dtype=np.int64) for window in windows]
    first, end, num_layers, num_experts = (int(number) for number in numbers[0][:4])
    counts = np.sum([window[4:] for window in numbers if window.size > 4], axis=0)
    shape = (num_layers, num_experts)
    return LoadWindow(first_pass=first, end_pass=end, counts_LE=counts.reshape(shape))
