"""How often each writer was shut out: the fence generation of its tickets and endpoints.

A ticket works only with an endpoint that is no newer than itself (see `kv_transfer.ticket`), so a
writer that slept through its fence cannot come back with what it was given before. Counted for each
writer alone: the fence of one must not void what others hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Fences:
    """Fences writers and counts it. Thread-safe.

    Entries stay for the life of the process, as a writer may wake up at any time: one for each life
    of a prefill worker that was ever fenced.
    """

    def __init__(self, fence_peer: Callable[[str], None]) -> None:
        """`fence_peer` is `Transport.fence`."""
        self._fence_peer = fence_peer
        self._lock = threading.Lock()
        self._generations: dict[str, int] = {}  # by writer

    def fence(self, writer: str, peer: str) -> None:
        """Shut out a rank of a writer; blocks.

        Args:
            writer: its `Writer.key`.
            peer: the rank's name on the transport.

        Raises:
            TransferFailedError: see `Transport.fence`.
        """
        with self._lock:
            # Before the fence: an endpoint that is good after it carries the new generation.
            self._generations[writer] = self._generations.get(writer, 0) + 1
        self._fence_peer(peer)

    def generation_of(self, writer: str) -> int:
        """Fences of ranks of `writer`, a `Writer.key`, that have begun so far."""
        with self._lock:
            return self._generations.get(writer, 0)
