"""Requests that wait for a place, and which of them is next: by tier, priority, arrival. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from runtime.tiers import Demand, Standing, TierPolicy


class Waiting(Protocol):
    """What a line holds; equal only to itself."""

    @property
    def standing(self) -> Standing:
        """Its tier and priority."""

    @property
    def num_choices(self) -> int:
        """Places that it takes."""


WaitingT = TypeVar("WaitingT", bound=Waiting)


class WaitingLine(Generic[WaitingT]):
    """``TierPolicy`` chooses the tier; within one the lowest priority goes, then who came first."""

    def __init__(self) -> None:
        self._policy = TierPolicy()
        self._numbers = itertools.count()
        self._items: dict[WaitingT, None] = {}  # in the order of arrival
        self._tiers: dict[int, list[tuple[int, int, WaitingT]]] = {}
        """A heap for each order: priority, number of arrival, and who; also some that have left."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[WaitingT]:
        """In the order of arrival."""
        return iter(self._items)

    def add(self, item: WaitingT) -> None:
        """Put one behind those of its tier and priority."""
        self._items[item] = None
        heap = self._tiers.setdefault(item.standing.order, [])
        heapq.heappush(heap, (item.standing.priority, next(self._numbers), item))

    def remove(self, item: WaitingT) -> None:
        """Take one out, wherever it stands; nothing happens where it has left already."""
        self._items.pop(item, None)
        # Those that have left go when they reach the front, or with the last that waits.
        if not self._items:
            self._tiers.clear()

    def pop(self) -> WaitingT | None:
        """Take out whoever is next; None where nobody waits."""
        heads = self._heads()
        if not heads:
            return None
        waiting = [
            Demand(order, head.standing.share, head.num_choices) for order, head in heads.items()
        ]
        order = self._policy.turn(waiting)
        self._policy.granted(order, waiting)
        self.remove(heads[order])
        return heads[order]

    def first_in_order(self) -> WaitingT | None:
        """Who would be next if nothing were owed to anybody."""
        heads = self._heads()
        return heads[min(heads)] if heads else None

    def last_behind(self, order: int) -> WaitingT | None:
        """The latest of the last tier in order, if that is behind ``order``; None without one."""
        behind = [item for item in self._items if item.standing.order > order]
        last = max((item.standing.order for item in behind), default=0)
        of_last = [item for item in behind if item.standing.order == last]
        return of_last[-1] if of_last else None

    def num_ahead_of(self, order: int) -> int:
        """Requests of this tier and of those before it."""
        return sum(item.standing.order <= order for item in self._items)

    def counts(self) -> Counter[str]:
        """Requests by the name of their tier."""
        return Counter(item.standing.tier for item in self._items)

    def _heads(self) -> dict[int, WaitingT]:
        """The next of every tier that has one."""
        heads: dict[int, WaitingT] = {}
        for order in list(self._tiers):
            heap = self._tiers[order]
            while heap and heap[0][2] not in self._items:
                heapq.heappop(heap)
            if heap:
                heads[order] = heap[0][2]
            else:
                del self._tiers[order]
        return heads
