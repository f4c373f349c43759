"""What brings the bytes of one expert from a rank to another rank's inbox.

What stands between moving experts, which is the same everywhere, and what the ranks have between
them: memory of a peer that is mapped here (`engine.parallel.nvlink.expert_carrier`), or a library
that writes into registered memory, which workers bring along (`worker.expert_transport`).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Carrier(Protocol):
    """One rank's. Called on the engine loop's thread between two steps, and never waits."""

    @property
    def is_ready(self) -> bool:
        """Whether nothing of before the latest `recover` can land any more, here or from here.

        Raises:
            TandemError: it will not become ready again.
        """
        ...

    def box(self, rank: int) -> Tensor:
        """Return what an expert for another rank is packed into, [nbytes] uint8.

        Its inbox, where that is mapped here; else the outbox of this rank.
        """
        ...

    def send(self, rank: int, start: int, end: int) -> None:
        """Start to bring bytes [start, end) of that box to the rank; the sending before is over."""
        ...

    def is_sent(self) -> bool:
        """Whether what was to be sent is in the peer's memory; yes before anything was.

        Raises:
            TandemError: it is not, and will not be.
        """
        ...

    def recover(self) -> None:
        """Give up what is under way; all ranks call in the same turn, and ask `is_ready` then."""
        ...

    def close(self) -> None:
        """Give back what it holds; all ranks call, after the last step."""
        ...
