"""Who may serve at all, whatever the request: filters of candidates by the pool alone.

They are asked when the pool changes, not at each pick. What an attempt excludes, and who failed a
moment ago, is asked at each pick (`router.routing.policy`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from router.pool.members import Role, WorkerKey
from router.pool.readiness import mismatch
from router.pool.view import Candidate, PoolView
from router.routing.request_shape import RequestShape


def takes_new(candidate: Candidate) -> bool:
    """Whether it is not draining."""
    return not candidate.member.draining


def is_whole(candidate: Candidate) -> bool:
    """Whether no rank of its instance is missing: else experts are not all there."""
    return candidate.whole


FILTERS: Mapping[str, Callable[[Candidate], bool]] = {
    "draining": takes_new,
    "incomplete": is_whole,
}
"""By what is said of those that do not pass."""


def is_usable(candidate: Candidate) -> bool:
    """Whether it passes all."""
    return all(passes(candidate) for passes in FILTERS.values())


def avoidable(usable: Sequence[Candidate], failing: Collection[WorkerKey]) -> set[WorkerKey]:
    """Those that failed lately, unless all of a role did: then they are the only hope."""
    if not failing:
        return set()
    healthy = {c.member.role for c in usable if c.member.key not in failing}
    return {c.member.key for c in usable if c.member.key in failing and c.member.role in healthy}


def why_none(pool: PoolView, shape: RequestShape) -> str:
    """Why no pair of ``pool`` is left for ``shape``: at which step, and what to do."""
    left: dict[Role, list[Candidate]] = {}
    for role in Role:
        candidates = pool.candidates(role)
        if not candidates:
            return f"no {role.value} worker is registered. Fix: wait, or start one"
        for reason, passes in FILTERS.items():
            candidates = [c for c in candidates if passes(c)]
            if not candidates:
                return f"all {role.value} workers are {reason}. Fix: retry in a moment"
        avoided = avoidable(candidates, pool.failing()) | shape.excluded
        left[role] = [c for c in candidates if c.member.key not in avoided]
        if not left[role]:
            return f"every {role.value} worker was tried. Fix: retry in a moment"
    kinds = {role: {c.member.compatibility for c in left[role]} for role in Role}
    return f"{mismatch(kinds)}. Fix: start those that differ with the settings of the others"
