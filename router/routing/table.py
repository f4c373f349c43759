"""The usable members of a pool, in groups that can be paired, with what each costs now.

It is kept up to date by what changes: a pick weighs anew only members whose load has changed since
the last one, and reads lists for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from router.pool.members import Role, WorkerKey
from router.pool.view import Candidate, PoolView
from router.routing.filters import is_usable
from router.routing.scorers import PairScorer


class Rank(NamedTuple):
    """The lowest is picked."""

    suspicion: int
    """Of the attempt; 0 in the table."""
    cost: float
    last_picked: int
    position: int
    """In the lists of its side."""


@dataclass(slots=True)
class Side:
    """One role within one group; the lists run in parallel."""

    role: Role
    candidates: list[Candidate] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)
    rooms: list[float] = field(default_factory=list)
    """Tokens that each takes at once; of decode ranks."""


@dataclass(slots=True)
class Group:
    """Members of which any two of different roles are a pair."""

    prefill: Side = field(default_factory=lambda: Side(Role.PREFILL))
    decode: Side = field(default_factory=lambda: Side(Role.DECODE))

    @property
    def sides(self) -> tuple[Side, Side]:
        """Prefill and decode."""
        return self.prefill, self.decode


class CandidateTable:
    """Follows one pool, for one scorer."""

    def __init__(self, pool: PoolView, scorer: PairScorer) -> None:
        self.pool = pool
        self.groups: list[Group] = []
        self.usable: list[Candidate] = []
        """Of all groups and both roles."""
        self._scorer = scorer
        self._version = -1
        self.places: dict[WorkerKey, tuple[Side, int]] = {}
        """Of the usable, in the lists of their sides."""
        self._last_picked: dict[WorkerKey, int] = {}
        self._num_picks = 0
        self._changed: set[WorkerKey] = set()
        pool.on_load(self._changed.add)

    def refresh(self) -> None:
        """Bring all up to date with the pool."""
        if self._version != self.pool.version:
            self._rebuild()
        for key in self._changed:
            place = self.places.get(key)
            if place is not None:
                self._weigh(*place)
        self._changed.clear()

    def note_picked(self, *picked: Candidate) -> None:
        """Their turn comes after that of all others."""
        self._num_picks += 1
        for candidate in picked:
            key = candidate.member.key
            self._last_picked[key] = self._num_picks
            self._changed.add(key)

    def _rebuild(self) -> None:
        self._version = self.pool.version
        groups: dict[tuple[str, str, str], Group] = {}
        self.usable = []
        self.places = {}
        present = [candidate for role in Role for candidate in self.pool.candidates(role)]
        for candidate in present:
            if not is_usable(candidate):
                continue
            member = candidate.member
            group = groups.setdefault(member.compatibility, Group())
            side = group.prefill if member.role is Role.PREFILL else group.decode
            self.places[member.key] = side, len(side.candidates)
            self.usable.append(candidate)
            side.candidates.append(candidate)
            side.ranks.append(Rank(0, 0.0, 0, 0))
            side.rooms.append(0.0)
        self.groups = list(groups.values())
        keys = {candidate.member.key for candidate in present}
        self._last_picked = {k: tick for k, tick in self._last_picked.items() if k in keys}
        self._changed.update(self.places)

    def _weigh(self, side: Side, position: int) -> None:
        candidate, scorer = side.candidates[position], self._scorer
        if side.role is Role.PREFILL:
            cost = scorer.prefill_cost(candidate)
        else:
            cost = scorer.decode_cost(candidate)
            side.rooms[position] = scorer.decode_room(candidate)
        last_picked = self._last_picked.get(candidate.member.key, 0)
        side.ranks[position] = Rank(0, cost, last_picked, position)
