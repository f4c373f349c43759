"""Whether the pool can serve, and whether it ever could.

Before the first pair of workers was there, a request has nobody to wait for: it is refused, and the
model is not listed. After that a pool without workers is one whose workers come back, and requests
may wait for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from router.pool.members import Role
from router.pool.view import PoolView


class Readiness:
    """Of one router process's pool. One event loop owns it."""

    def __init__(self, pool: PoolView) -> None:
        self._pool = pool
        self._was_ready = False
        pool.on_change(self._observe)

    @property
    def was_ready(self) -> bool:
        """Whether there was a pair at some time, now included."""
        self._observe()
        return self._was_ready

    def missing(self) -> list[str]:
        """What keeps a request from being served now; empty when nothing does."""
        kinds = {
            role: {
                candidate.member.compatibility
                for candidate in self._pool.candidates(role)
                if candidate.whole and not candidate.member.draining
            }
            for role in Role
        }
        missing = [f"no {role.value} worker is ready" for role in Role if not kinds[role]]
        if not missing and kinds[Role.PREFILL].isdisjoint(kinds[Role.DECODE]):
            missing = [mismatch(kinds)]
        return missing

    def _observe(self) -> None:
        self._was_ready = self._was_ready or not self.missing()


def mismatch(kinds: Mapping[Role, Collection[tuple[str, str, str]]]) -> str:
    """That nobody of one role can be paired with the other, by ``Member.compatibility``."""
    said = "; ".join(
        f"{role.value}: layout {layout}, transport {transport}"
        for role in Role
        for _, layout, transport in sorted(kinds[role])
    )
    need = "they need the same model, kv_dtype, block_size and transport"
    return f"no prefill worker matches a decode worker ({said}): {need}"
