"""Those who wait for their turn, and who is next: by tier, priority, tenant, arrival. Pure.

Tenants take turns by what they have had: of those that wait, whoever has had least goes first. What
a turn costs is known before it (places in flight) or after it (seconds of CPU); either way it is
charged to its tenant. Who begins to wait counts as having had no less than the least of those that
wait already, so nothing is hoarded, and while a tenant waits no other one gets more than it by more
than the largest costs of one turn of each.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from runtime.tiers import Demand, Standing, TierPolicy


class Waiting(Protocol):
    """What a line holds; equal only to itself."""

    @property
    def standing(self) -> Standing:
        """Its tier, priority and tenant."""

    @property
    def num_choices(self) -> int:
        """Places that it takes; 0 where its cost is known, and charged, when its turn is over."""


WaitingT = TypeVar("WaitingT", bound=Waiting)
_Heap = list[tuple[int, int, WaitingT]]
"""Priority, number of arrival, and who; also some that have left."""


def _anybody(tenant: str) -> bool:
    return True


class WaitingLine(Generic[WaitingT]):
    """``TierPolicy`` chooses the tier; within one the lowest priority goes, then the tenant that
    has had least, then who came first.
    """

    def __init__(self) -> None:
        self._policy = TierPolicy()
        self._numbers = itertools.count()
        self._items: dict[WaitingT, None] = {}  # in the order of arrival
        self._tiers: dict[int, dict[str, _Heap[WaitingT]]] = {}
        """By order and tenant."""
        self._waiting: Counter[str] = Counter()
        """Items of each tenant; of those that wait alone."""
        self._had: dict[str, float] = {}
        """By tenant, what its turns have cost."""
        self._least = 0.0
        """What nobody who waits has had less of."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[WaitingT]:
        """In the order of arrival."""
        return iter(self._items)

    def add(self, item: WaitingT) -> None:
        """Put one behind those of its tier, priority and tenant."""
        standing = item.standing
        self._items[item] = None
        if not self._waiting[standing.tenant]:
            self.charge(standing.tenant, 0.0)
        self._waiting[standing.tenant] += 1
        heap = self._tiers.setdefault(standing.order, {}).setdefault(standing.tenant, [])
        heapq.heappush(heap, (standing.priority, next(self._numbers), item))

    def remove(self, item: WaitingT) -> None:
        """Take one out, wherever it stands; nothing happens where it has left already."""
        if item not in self._items:
            return
        del self._items[item]
        tenant = item.standing.tenant
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        # Those that have left go when they reach the front, or with the last that waits.
        if not self._items:
            self._tiers.clear()

    def charge(self, tenant: str, cost: float) -> None:
        """A turn of ``tenant`` has cost so much."""
        self._had[tenant] = max(self._had.get(tenant, 0.0), self._least) + cost

    def num_waiting_of(self, tenant: str) -> int:
        """Items of one tenant."""
        return self._waiting.get(tenant, 0)

    def pop(self, may_go: Callable[[str], bool] = _anybody) -> WaitingT | None:
        """Take out whoever is next of the tenants that may go; None where nobody of them waits."""
        heads = self._heads(may_go)
        if not heads:
            return None
        waiting = [
            Demand(order, head.standing.share, head.num_choices) for order, head in heads.items()
        ]
        order = self._policy.turn(waiting)
        self._policy.granted(order, waiting)
        head = heads[order]
        self._least = max(self._least, min(self._had[tenant] for tenant in self._waiting))
        self.remove(head)
        self.charge(head.standing.tenant, head.num_choices)
        return head

    def first_in_order(self) -> WaitingT | None:
        """Who would be next if nothing were owed to any tier."""
        heads = self._heads(_anybody)
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

    def _heads(self, may_go: Callable[[str], bool]) -> dict[int, WaitingT]:
        """The next of every tier that has one."""
        heads: dict[int, WaitingT] = {}
        for order in list(self._tiers):
            tenants = self._tiers[order]
            firsts: list[tuple[int, float, int, WaitingT]] = []
            for tenant in list(tenants):
                heap = tenants[tenant]
                while heap and heap[0][2] not in self._items:
                    heapq.heappop(heap)
                if not heap:
                    del tenants[tenant]
                elif may_go(tenant):
                    priority, number, item = heap[0]
                    firsts.append((priority, self._had[tenant], number, item))
            if firsts:
                heads[order] = min(firsts)[3]
            if not tenants:
                del self._tiers[order]
        return heads
