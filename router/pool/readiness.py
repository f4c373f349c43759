"""Whether the pool can serve, and whether it ever could.

Before the first pair of workers was there, the model is not listed, and requests wait only as long
as workers that were there before this process may need to find it: a router that is started again
is no second outage. Later they have nobody to wait for, and are refused. After the first pair a
pool without workers is one whose workers come back, and requests may wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from router.pool.members import Role
from router.pool.view import PoolView
from runtime.notifications import Notifications


class Readiness:
    """Of one router process's pool. One event loop owns it."""

    def __init__(self, pool: PoolView, *, found_by: float = 0.0) -> None:
        """``found_by``: when living workers will have found this process, by the loop's clock."""
        self._pool = pool
        self._found_by = found_by
        self._was_ready = False
        self._changes = Notifications()
        pool.on_change(self._observe)
        pool.on_change(self._changes.notify)

    @property
    def was_ready(self) -> bool:
        """Whether there was a pair at some time, now included."""
        self._observe()
        return self._was_ready

    async def first_pair(self) -> bool:
        """Whether there was ever one; waits for it while living workers may yet come."""
        loop = asyncio.get_running_loop()
        while not self.was_ready and (left_s := self._found_by - loop.time()) > 0.0:
            await self._changes.wait(left_s)
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
