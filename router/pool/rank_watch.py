"""What the ranks of an instance tell of their waits, put together: who is slow, and why.

Kept by the control process alone: blocks come with renewals, and a picture of every instance, far
smaller, goes on to the HTTP processes. One event loop owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from router.pool.members import WorkerKey
from runtime.pb import registry_pb2
from runtime.stragglers.rank_judge import MOST_BLOCKS, RankJudge
from runtime.stragglers.rank_picture import RankPicture, block_from_proto, picture_of
from runtime.stragglers.rank_waits import BLOCKS_OF_WINDOW, RankBlock, window_of

LOOK_S = 2.0
"""An instance is looked at so often at most: with 72 ranks that takes some 100 ms."""
KEPT_BLOCKS = 4 * BLOCKS_OF_WINDOW
"""Of a rank: ranks renew at different times, and a window needs the blocks that all have told."""

Life = tuple[str, int]


@dataclass(slots=True)
class _Instance:
    num_ranks: int
    blocks: dict[int, dict[int, RankBlock]] = field(default_factory=dict)
    """By rank and number."""
    judge: RankJudge = field(default_factory=RankJudge)
    picture: RankPicture | None = None
    looked_at: float = float("-inf")
    has_news: bool = False


class RankWatch:
    """See the module."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: monotonic seconds."""
        self._clock = clock
        self._instances: dict[Life, _Instance] = {}

    def heard(
        self, key: WorkerKey, num_ranks: int, blocks: Sequence[registry_pb2.RankBlock]
    ) -> None:
        """A rank of ``num_ranks`` has told its last blocks, perhaps not for the first time."""
        if num_ranks < 2 or not blocks:
            return
        instance = self._instances.setdefault(key.life, _Instance(num_ranks))
        known = instance.blocks.setdefault(key.rank, {})
        for message in blocks:
            if message.number not in known:
                known[message.number] = block_from_proto(message)
                instance.has_news = True
        for number in sorted(known)[:-KEPT_BLOCKS]:
            del known[number]

    def pictures(self, lives: Collection[Life]) -> list[RankPicture]:
        """Of the instances that are there, by name; the others are forgotten."""
        for life in set(self._instances).difference(lives):
            del self._instances[life]
        found = (self._look(*item) for item in sorted(self._instances.items()))
        return [picture for picture in found if picture is not None]

    def _look(self, life: Life, instance: _Instance) -> RankPicture | None:
        now = self._clock()
        if instance.has_news and now - instance.looked_at >= LOOK_S:
            told = {rank: list(blocks.values()) for rank, blocks in instance.blocks.items()}
            window = window_of(told, instance.num_ranks, most=MOST_BLOCKS)
            if window is not None:
                findings = instance.judge.look(window)
                shown = window.newest(BLOCKS_OF_WINDOW)
                instance.picture = picture_of(life[0], shown, findings)
                instance.looked_at, instance.has_news = now, False
        return instance.picture
