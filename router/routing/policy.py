"""Which prefill worker and which decode rank serve a request: filter > score > pick.

The choice is joint: both must agree on model, KV layout and transport. Of equally good members the
one that was picked least recently is taken, so round-robin is the scorer that finds all equal.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.pool.members import Member, WorkerKey
from router.pool.view import PoolView
from router.routing.filters import avoidable, why_none
from router.routing.request_shape import RequestShape
from router.routing.scorers import SCORERS, PairScorer
from router.routing.table import CandidateTable, Group, Rank, Side
from runtime.errors import OverloadedError

SHORT_LIST = 4
"""Of each side: the members that a scorer of pairs is asked about."""


class NoWorkersError(OverloadedError):
    """No pair can serve now."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Who serves one attempt of a request."""

    prefill: Member
    decode: Member

    @property
    def keys(self) -> tuple[WorkerKey, WorkerKey]:
        """(prefill, decode)."""
        return self.prefill.key, self.decode.key


class _Choice(NamedTuple):
    """The best pair of one group; of several groups the lowest is taken."""

    has_not_preferred: bool
    suspicion: int
    lacks_room: bool
    score: float
    last_picked: int
    number: int
    """Of the group."""
    prefill: int
    decode: int


class PairingPolicy:
    """Picks pairs of one pool; remembers only when each member was last picked."""

    def __init__(self, name: str, scorers: Mapping[str, PairScorer] = SCORERS) -> None:
        """``name`` is one of ``scorers``."""
        self._scorer = scorers[name]
        self._table: CandidateTable | None = None

    def pick(self, shape: RequestShape, pool: PoolView) -> Pair:
        """The pair for one attempt.

        Raises:
            NoWorkersError: no pair is left; the message says at which step.
        """
        table = self._table
        if table is None or table.pool is not pool:
            table = self._table = CandidateTable(pool, self._scorer)
        table.refresh()
        avoided = avoidable(table.usable, pool.failing())
        best: _Choice | None = None
        for number, group in enumerate(table.groups):
            choice = self._best_of(number, group, shape, avoided)
            if choice is not None and (best is None or choice < best):
                best = choice
        if best is None:
            raise NoWorkersError(why_none(pool, shape))
        group = table.groups[best.number]
        prefill = group.prefill.candidates[best.prefill]
        decode = group.decode.candidates[best.decode]
        table.note_picked(prefill, decode)
        return Pair(prefill.member, decode.member)

    def _best_of(
        self, number: int, group: Group, shape: RequestShape, avoided: Collection[WorkerKey]
    ) -> _Choice | None:
        """The best pair within one group."""
        prefills = _left(group.prefill, shape, avoided)
        decodes = _left(group.decode, shape, avoided)
        if not prefills or not decodes:
            return None
        preferred = _preferred(group.prefill, prefills, shape)
        roomy = self._with_room(group.decode, decodes, shape)
        prefill, decode, score = self._best_pair(
            group, preferred or prefills, roomy or decodes, shape
        )
        return _Choice(
            shape.preferred_prefill is not None and not preferred,
            prefill.suspicion + decode.suspicion,
            not roomy,
            score,
            prefill.last_picked + decode.last_picked,
            number,
            prefill.position,
            decode.position,
        )

    def _with_room(self, side: Side, ranks: Sequence[Rank], shape: RequestShape) -> Sequence[Rank]:
        """Of the least suspect ranks those with room for the request at once."""
        needed = shape.num_tokens_needed
        best, rooms = min(ranks), side.rooms
        if self._scorer.separable and rooms[best.position] >= needed:
            return [best]  # nobody will ask for another
        return [r for r in ranks if rooms[r.position] >= needed and r.suspicion == best.suspicion]

    def _best_pair(
        self, group: Group, prefills: Sequence[Rank], decodes: Sequence[Rank], shape: RequestShape
    ) -> tuple[Rank, Rank, float]:
        if self._scorer.separable:
            prefill, decode = min(prefills), min(decodes)
            return prefill, decode, prefill.cost + decode.cost
        pairs = itertools.product(
            heapq.nsmallest(SHORT_LIST, prefills), heapq.nsmallest(SHORT_LIST, decodes)
        )
        scored = [
            (
                prefill.suspicion + decode.suspicion,
                self._scorer.score(
                    group.prefill.candidates[prefill.position],
                    group.decode.candidates[decode.position],
                    shape,
                ),
                prefill.last_picked + decode.last_picked,
                prefill,
                decode,
            )
            for prefill, decode in pairs
        ]
        _, score, _, prefill, decode = min(scored)
        return prefill, decode, score


def _left(side: Side, shape: RequestShape, avoided: Collection[WorkerKey]) -> Sequence[Rank]:
    """Whom this attempt may use, with its suspicion of each."""
    if not (avoided or shape.excluded or shape.suspects):
        return side.ranks
    # Ranks of an instance end together, so the others are half as suspect.
    lives = {key.life for key in shape.suspects}
    left = []
    for rank, candidate in zip(side.ranks, side.candidates, strict=True):
        key = candidate.member.key
        if key not in avoided and key not in shape.excluded:
            suspicion = (key in shape.suspects) + (key.life in lives) if lives else 0
            left.append(rank._replace(suspicion=suspicion) if suspicion else rank)
    return left


def _preferred(side: Side, ranks: Sequence[Rank], shape: RequestShape) -> list[Rank]:
    """The prefill worker that has the KV, if it is among them."""
    wanted = shape.preferred_prefill
    if wanted is None:
        return []
    return [rank for rank in ranks if side.candidates[rank.position].member.key == wanted]
