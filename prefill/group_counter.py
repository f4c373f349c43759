"""What the gates of all ranks of a tensor-parallel worker have counted, as rank 0 reads it.

Where ranks have shares of the rows each counts its own, so a reading adds them up: rank 0 has the
others told between two of their steps, and all join in one sum, behind the steps so far. Nobody
waits for it; between readings nothing is added to the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from engine.experts.counted import CountedExperts
from engine.experts.counter import Reading


class GroupCounter:
    """See `experts.windows.ReadableCounts`; on rank 0's engine loop."""

    def __init__(
        self,
        experts: CountedExperts,
        tell: Callable[[], None],
        watch: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Wait to be read.

        Args:
            experts: of this rank.
            tell: has the other ranks join, in the same place among their steps.
            watch: limits the time of a reading's start, which waits for the other ranks.
        """
        self._experts, self._tell, self._watch = experts, tell, watch

    def start_reading(self) -> Reading:
        """See `ReadableCounts`.

        Raises:
            PeerLostError: another rank is gone.
        """
        group = self._experts.sharing
        with self._watch():
            if group.size > 1:
                self._tell()
            return self._experts.counter.start_reading(group)
