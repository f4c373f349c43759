"""Which prefill worker and which decode rank serve a request: filter > score > pick. Pure.

Filters drop candidates that must not or should not be used, a scorer says how loaded the rest are
(lower is better), the picker takes the least recently picked of the best. Round-robin is the scorer
that finds all equal. The choice is joint: both must agree on model, KV layout and transport.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from router.pool.members import Member, Role, WorkerKey
from router.pool.view import Candidate
from runtime.errors import OverloadedError

Filter = Callable[[Sequence[Candidate]], list[Candidate]]
Scorer = Callable[[Candidate], float]
_PairRank = tuple[int, float, int]
"""(suspicion, score, when last picked) of one or both: the lowest is picked."""

TOKENS_PER_REQUEST = 1024
"""So many waiting prompt tokens weigh as much as one request."""


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


@dataclass(slots=True)
class Exclusions:
    """What earlier attempts of one request say about the next."""

    members: set[WorkerKey] = field(default_factory=set)
    """At fault: not to be used again."""
    suspects: set[WorkerKey] = field(default_factory=set)
    """Of a pair that failed, nobody knows by whose fault: to be used where there is no other."""
    preferred: WorkerKey | None = None
    """The prefill worker that has the request's KV: to be taken where it is as good."""


def not_draining(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Without members that take nothing new."""
    return [c for c in candidates if not c.member.draining]


def whole_instance(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Without ranks of an instance that lacks some: its experts are not all there."""
    return [c for c in candidates if c.whole]


def prefer_healthy(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Without members that failed lately, unless all did: then they are the only hope."""
    return [c for c in candidates if not c.recently_failed] or list(candidates)


FILTERS: Mapping[str, Filter] = {
    "draining": not_draining,
    "incomplete": whole_instance,
    "failed": prefer_healthy,
}


def load_score(candidate: Candidate) -> float:
    """Requests in hand, waiting prompt tokens, and how full the block pool is (a tie-breaker)."""
    load = candidate.member.load
    used = 1.0 - load.num_free_blocks / load.num_total_blocks if load.num_total_blocks else 0.0
    return candidate.num_requests + candidate.num_tokens / TOKENS_PER_REQUEST + used / 2


def equal_score(candidate: Candidate) -> float:
    """All alike: the picker alone decides."""
    return 0.0


SCORERS: Mapping[str, Scorer] = {"least-loaded": load_score, "round-robin": equal_score}


class PairingPolicy:
    """Picks pairs; remembers only when each member was last picked."""

    def __init__(self, name: str) -> None:
        """``name`` is one of ``SCORERS``."""
        self._scorer = SCORERS[name]
        self._ticks = itertools.count(1)
        self._last_picked: dict[WorkerKey, int] = {}

    def pick(
        self,
        prefills: Sequence[Candidate],
        decodes: Sequence[Candidate],
        exclusions: Exclusions | None = None,
    ) -> Pair:
        """The pair for one attempt.

        Raises:
            NoWorkersError: no pair is left; the message says at which step.
        """
        excluded = exclusions or Exclusions()
        groups: dict[tuple[str, str, str], tuple[list[Candidate], list[Candidate]]] = {}
        for side, candidates in enumerate(
            (
                self._usable(Role.PREFILL, prefills, excluded),
                self._usable(Role.DECODE, decodes, excluded),
            )
        ):
            for candidate in candidates:
                group = groups.setdefault(candidate.member.compatibility, ([], []))
                group[side].append(candidate)
        best: tuple[_PairRank, Pair] | None = None
        for ours, theirs in groups.values():
            found = self._best_of(ours, theirs, excluded)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        if best is None:
            raise NoWorkersError(_why_no_pair(groups))
        pair = best[1]
        self._remember(pair, {c.member.key for c in (*prefills, *decodes)})
        return pair

    def _usable(
        self, role: Role, candidates: Sequence[Candidate], excluded: Exclusions
    ) -> list[Candidate]:
        left = list(candidates)
        if not left:
            raise NoWorkersError(f"no {role.value} worker is registered. Fix: wait, or start one")
        for reason, keep in FILTERS.items():
            left = keep(left)
            if not left:
                raise NoWorkersError(
                    f"all {role.value} workers are {reason}. Fix: retry in a moment"
                )
        left = [c for c in left if c.member.key not in excluded.members]
        if not left:
            raise NoWorkersError(f"every {role.value} worker was tried. Fix: retry in a moment")
        return left

    def _best_of(
        self, prefills: Sequence[Candidate], decodes: Sequence[Candidate], excluded: Exclusions
    ) -> tuple[_PairRank, Pair] | None:
        """The best pair within one compatible group; the two choices are independent."""
        if not prefills or not decodes:
            return None

        suspects = excluded.suspects
        lives = {key.life for key in suspects}
        preferred = [c for c in prefills if c.member.key == excluded.preferred]

        def rank(candidate: Candidate) -> _PairRank:
            key = candidate.member.key
            # Ranks of an instance end together, so the others are half as suspect.
            suspicion = (key in suspects) + (key.life in lives)
            return suspicion, self._scorer(candidate), self._last_picked.get(key, 0)

        prefill, decode = min(preferred or prefills, key=rank), min(decodes, key=rank)
        (p_suspect, p_score, p_last), (d_suspect, d_score, d_last) = rank(prefill), rank(decode)
        pair_rank = (p_suspect + d_suspect, p_score + d_score, p_last + d_last)
        return pair_rank, Pair(prefill.member, decode.member)

    def _remember(self, pair: Pair, present: set[WorkerKey]) -> None:
        tick = next(self._ticks)
        for key in pair.keys:
            self._last_picked[key] = tick
        if len(self._last_picked) > 2 * len(present) + 16:
            self._last_picked = {k: t for k, t in self._last_picked.items() if k in present}


def _why_no_pair(
    groups: Mapping[tuple[str, str, str], tuple[Sequence[Candidate], Sequence[Candidate]]],
) -> str:
    kinds = "; ".join(
        f"{'prefill' if prefills else 'decode'}: layout {layout}, transport {transport}"
        for (_, layout, transport), (prefills, _) in groups.items()
    )
    return (
        f"no prefill worker matches a decode worker ({kinds}). "
        "Fix: run both with the same model, kv_dtype, block_size and transport"
    )
