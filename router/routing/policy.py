"""Which prefill worker and which decode rank serve a request: filter > score > pick.

The choice is joint: both must agree on model, KV layout and transport. Of equally good members the
one that was picked least recently is taken, so round-robin is the scorer that finds all equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from router.pool.members import Member, WorkerKey
from router.pool.view import Candidate, PoolView
from router.routing.estimate import PairEstimate, estimate_pair
from router.routing.explain import Explanation, best_of, why_no_more
from router.routing.filters import avoidable, why_none
from router.routing.prefixes import Binding, Prefixes
from router.routing.request_shape import RequestShape
from router.routing.scorers import SCORERS, PairScorer
from router.routing.short_list import short_list
from router.routing.table import CandidateTable, Group, Rank, Side
from runtime.errors import OverloadedError


class NoWorkersError(OverloadedError):
    """No pair can serve now."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Who serves one attempt of a request."""

    prefill: Member
    decode: Member
    estimate: PairEstimate | None = None
    """Where the policy goes by prefixes."""
    why: Explanation | None = None
    """Where the request asks for it."""

    @property
    def keys(self) -> tuple[WorkerKey, WorkerKey]:
        """(prefill, decode)."""
        return self.prefill.key, self.decode.key

    def num_new_tokens(self, num_context_tokens: int) -> int:
        """Of a context, that prefill has to compute as far as is known."""
        return num_context_tokens if self.estimate is None else self.estimate.num_new_tokens


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
    """Picks pairs of one pool; remembers when each member was last picked, and for what."""

    def __init__(
        self,
        name: str,
        scorers: Mapping[str, PairScorer] = SCORERS,
        *,
        prefixes: Prefixes | None = None,
    ) -> None:
        """``name`` is one of ``scorers``; ``prefixes`` is what one that goes by them asks."""
        self._name = name
        self._scorer = scorers[name]
        self.prefixes = prefixes if self._scorer.by_prefix else None
        """None where the policy does not go by them: nothing has to be followed."""
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
        prefixes = self.prefixes
        if prefixes is None:
            return self._cheapest(shape, table, avoided)
        prefixes.expire()
        if shape.block_hashes:
            shape = replace(shape, match=prefixes.index.match(shape.block_hashes))
        bound, state = self._bound(shape, table, avoided)
        pair = bound or self._cheapest(shape, table, avoided)
        prefill, decode = (_candidate(table, key) for key in pair.keys)
        estimate = estimate_pair(prefill, decode, shape)
        prefixes.expect(pair.prefill.key, shape.block_hashes, estimate.queue_s + estimate.compute_s)
        if shape.conversation and state in ("none", "gone"):
            binding = Binding(*pair.keys)
            prefixes.conversations.bind(shape.cache_salt, shape.conversation, binding)
        why = self._explain(prefill, estimate, shape, state) if shape.explain else None
        return replace(pair, estimate=estimate, why=why)

    def _cheapest(
        self, shape: RequestShape, table: CandidateTable, avoided: Collection[WorkerKey]
    ) -> Pair:
        """By the scorer."""
        best: _Choice | None = None
        for number, group in enumerate(table.groups):
            choice = self._best_of(number, group, shape, avoided)
            if choice is not None and (best is None or choice < best):
                best = choice
        if best is None:
            raise NoWorkersError(why_none(table.pool, shape))
        group = table.groups[best.number]
        prefill = group.prefill.candidates[best.prefill]
        decode = group.decode.candidates[best.decode]
        table.note_picked(prefill, decode)
        return Pair(prefill.member, decode.member)

    def _bound(
        self, shape: RequestShape, table: CandidateTable, avoided: Collection[WorkerKey]
    ) -> tuple[Pair | None, str]:
        """The pair that the conversation had last, unless it is gone or overloaded; and which.

        It is kept as long as the prefill worker's queue is no longer than another's by what it
        takes to compute the whole context there. What is overloaded now stays bound: the next turn
        may find it free. Where decode has no room, another rank serves beside the same worker.
        """
        prefixes = self.prefixes
        if prefixes is None or not shape.conversation or shape.preferred_prefill is not None:
            return None, "none"
        binding = prefixes.conversations.get(shape.cache_salt, shape.conversation)
        if binding is None:
            return None, "none"
        shut_out = {*avoided, *shape.excluded, *shape.suspects}
        places = [table.places.get(key) for key in binding]
        if None in places or shut_out & set(binding):
            return None, "gone"
        prefill, decode = (_candidate(table, key) for key in binding)
        if prefill.member.compatibility != decode.member.compatibility:
            return None, "gone"
        side, _ = table.places[binding.prefill]
        order = shape.tier_order
        least_s = side.candidates[min(side.ranks).position].queue_ahead_s(order)
        recompute_s = shape.num_context_tokens / prefill.tokens_per_s
        if prefill.queue_ahead_s(order) > least_s + recompute_s:
            return None, "overloaded"
        if self._scorer.decode_room(decode) < shape.num_tokens_needed:
            beside = replace(shape, preferred_prefill=binding.prefill)
            return self._cheapest(beside, table, avoided), "kept"
        table.note_picked(prefill, decode)
        return Pair(prefill.member, decode.member), "kept"

    def _explain(
        self, prefill: Candidate, estimate: PairEstimate, shape: RequestShape, state: str
    ) -> Explanation:
        table, prefixes = self._table, self.prefixes
        assert table is not None
        assert prefixes is not None
        sides = [[c.member.key for c in side.candidates] for g in table.groups for side in g.sides]
        best_prefill = best_of(shape.match, [key for side in sides[::2] for key in side])
        best_decode = best_of(shape.match, [key for side in sides[1::2] for key in side])
        found, index = estimate.prefill_blocks, prefixes.index
        return Explanation(
            policy=self._name,
            binding=state,
            estimate=estimate,
            num_blocks=len(shape.block_hashes),
            best_prefill=best_prefill,
            best_decode=best_decode,
            miss=why_no_more(found, best_prefill[1], shape, index, prefill.member.block_size),
        )

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
        assert self._table is not None
        places, match = self._table.places, shape.match
        pairs = itertools.product(
            short_list(group.prefill, prefills, places, match),
            short_list(group.decode, decodes, places, match),
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


def _candidate(table: CandidateTable, key: WorkerKey) -> Candidate:
    side, position = table.places[key]
    return side.candidates[position]


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
