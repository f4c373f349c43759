"""Which reservations were seen: a nonce works once, not at all once it is revoked. Pure.

Decode draws a nonce for each reservation. Somebody may present it twice (a retried or a replayed
call) or too late (decode revoked it before the call arrived). Decode itself gives no ticket for a
reservation that is over, so what is forgotten here costs a refused claim and no foreign block; this
memory answers `Revoke`, and spares the work. It is bounded twice: an entry expires when its request
could not be live any more, and beyond `capacity` those that would expire first are forgotten.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable


class NonceState(enum.Enum):
    """What became of a nonce that is not new."""

    USED = "used"
    REVOKED = "revoked"
    UNDRAINED = "undrained"
    """Used, and it ended with a write of which nobody knows whether it is still on its way."""


class NonceMemory:
    """Nonces that must not be accepted (again). Not thread-safe."""

    def __init__(self, clock: Callable[[], float], *, capacity: int = 1 << 18) -> None:
        """Start empty.

        Args:
            clock: monotonic seconds.
            capacity: most nonces that are remembered.
        """
        assert capacity > 0
        self._clock = clock
        self._capacity = capacity
        self._entries: dict[int, tuple[NonceState, float]] = {}  # nonce -> state, expiry
        self._expiries: list[tuple[float, int]] = []  # heap; outdated pairs are skipped

    def __len__(self) -> int:
        return len(self._entries)

    def state(self, nonce: int) -> NonceState | None:
        """Return what became of `nonce`; None if it is new (or forgotten)."""
        self._forget_expired()
        entry = self._entries.get(nonce)
        return None if entry is None else entry[0]

    def use(self, nonce: int, remember_s: float) -> NonceState | None:
        """Claim a new nonce and return None, or return why it cannot be used."""
        state = self.state(nonce)
        if state is None:
            self.set_state(nonce, NonceState.USED, remember_s)
        return state

    def set_state(self, nonce: int, state: NonceState, remember_s: float) -> None:
        """Refuse `nonce` for at least `remember_s` seconds from now; `state` says why."""
        self._forget_expired()
        expiry = self._clock() + remember_s
        if nonce in self._entries:
            expiry = max(expiry, self._entries[nonce][1])
        self._entries[nonce] = (state, expiry)
        heapq.heappush(self._expiries, (expiry, nonce))
        while len(self._entries) > self._capacity:
            self._pop_first()

    def _forget_expired(self) -> None:
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            self._pop_first()

    def _pop_first(self) -> None:
        expiry, nonce = heapq.heappop(self._expiries)
        # A nonce that was revoked after its use stands in the heap twice.
        if nonce in self._entries and self._entries[nonce][1] == expiry:
            del self._entries[nonce]
