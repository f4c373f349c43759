"""Of one side of a group the members that a scorer of pairs is asked about.

The cheapest, whatever they hold, and of those that hold most of the context the cheapest, level by
level: who is neither is beaten by one of these, where scores grow with load and fall with what is
held.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from router.pool.members import WorkerKey
from router.pool.prefix_index import PrefixMatch
from router.routing.table import Rank, Side

NUM_CHEAPEST = 4
NUM_LEVELS = 4
NUM_OF_LEVEL = 2


def short_list(
    side: Side,
    ranks: Sequence[Rank],
    places: Mapping[WorkerKey, tuple[Side, int]],
    match: PrefixMatch,
) -> list[Rank]:
    """At most 12 of ``ranks``, which are of ``side``; ``places`` says where members are."""
    listed = heapq.nsmallest(NUM_CHEAPEST, ranks)
    if not match.most:
        return listed
    positions = {rank.position for rank in listed}
    by_position: Mapping[int, Rank] | None = None
    num_levels = 0
    for level in match.levels():
        here = [place[1] for key in level.keys if (place := places.get(key)) and place[0] is side]
        if not here:
            continue
        if by_position is None:
            by_position = {rank.position: rank for rank in ranks}
        left = [rank for at in here if (rank := by_position.get(at)) is not None]
        for rank in heapq.nsmallest(NUM_OF_LEVEL, left):
            if rank.position not in positions:
                positions.add(rank.position)
                listed.append(rank)
        num_levels += bool(left)
        if num_levels == NUM_LEVELS:
            break
    return listed
