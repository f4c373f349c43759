"""Whether the pool can serve, and whether it ever could.

Before the first pair of workers was there, a request has nobody to wait for: it is refused, and the
model is not listed. After that a pool without workers is one whose workers come back, and requests
may wait for them.
"""

from __future__ import annotations

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
        """Whether both roles were there at some time, now included."""
        self._observe()
        return self._was_ready

    def missing(self) -> list[str]:
        """What keeps a request from being served now; empty when nothing does."""
        return [
            f"no {role.value} worker is ready"
            for role in Role
            if not any(c.whole and not c.member.draining for c in self._pool.candidates(role))
        ]

    def _observe(self) -> None:
        self._was_ready = self._was_ready or not self.missing()
