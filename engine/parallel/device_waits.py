"""Waits that a device has recorded, transfer by transfer, made the waits of a step. Pure.

Where transfers are captured in a graph the host sees none of them: the device notes when each
source came, and the host reads that behind a step. Steps are told apart by the numbers of their
transfers: what is new in a reading is of the step that it stands behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime.stragglers.rank_waits import Phase

Ints = npt.NDArray[np.int64]
_NS: float = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """N transfers of one rank, in their order; times by its device's clock.

    Attributes:
        numbers: [N] ascending, from 1.
        are_combines: [N] the others are dispatches.
        num_rows: [N] that this rank's experts got; only of dispatches.
        begin_ns: [N] when the rank began to wait.
        first_ns: [N, R] when it saw the first of a source's flags.
        last_ns: [N, R] when it saw the last of them: all that the source sends is there.
    """

    numbers: Ints
    are_combines: npt.NDArray[np.bool_]
    num_rows: Ints
    begin_ns: Ints
    first_ns: Ints
    last_ns: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepWaits:
    """One step of one rank, summed over its layers.

    Attributes:
        waits_s: [P, R] by phase and source, until a source's last flag; 0 for the rank itself.
        first_s: [P, R] the same until its first flag.
        own_s: [P] from the end of a wait to the beginning of the next.
        num_rows: that its experts got.
        num_transfers: that were found.
        idle_s: that the device stood idle before the step, for want of it; in the own work before
            the first dispatch.
    """

    waits_s: npt.NDArray[np.float64]
    first_s: npt.NDArray[np.float64]
    own_s: npt.NDArray[np.float64]
    num_rows: int
    num_transfers: int
    idle_s: float = 0.0


class WaitReading(Protocol):
    """What was recorded up to the end of some step, perhaps still on its way to the host."""

    @property
    def is_done(self) -> bool:
        """Whether `take` would return at once."""
        ...

    def take(self) -> StepWaits:
        """Wait for the step; readings are taken in their order, each once."""
        ...


class DeviceWaits(Protocol):
    """What a device records; on the thread that launches steps."""

    def begin_step(self) -> None:
        """A step is about to be launched."""
        ...

    def start_reading(self) -> WaitReading:
        """Start to copy out what was recorded, behind all steps that were launched."""
        ...


class StepSplitter:
    """Says what of a reading is new; one for all readings of a rank."""

    def __init__(self) -> None:
        self._number, self._end_ns = 0, 0

    def take(self, records: Records) -> StepWaits:
        """Return the transfers since the reading before, or as many of them as are still there."""
        numbers, num_ranks = records.numbers, records.last_ns.shape[1]
        end_ns = records.last_ns.max(axis=1) if len(numbers) else np.zeros(0, np.int64)
        is_new = numbers > self._number
        # A wait's beginning is compared with the end of the one before; if that is not known, with
        # itself.
        before_ns = np.concatenate(([self._end_ns], end_ns[:-1]))[: len(numbers)]
        follows = np.diff(numbers, prepend=self._before(numbers)) == 1
        own_ns = np.where(follows, records.begin_ns - before_ns, 0)
        phases = np.where(records.are_combines, Phase.COMBINE, Phase.DISPATCH)
        if is_new.any():
            newest = int(np.argmax(is_new))  # the oldest of those that are new
            if phases[newest] == Phase.DISPATCH:
                phases[newest] = Phase.FIRST
            self._number, self._end_ns = int(numbers[-1]), int(end_ns[-1])
        of_phase = (phases[is_new] == np.array(list(Phase))[:, None]).astype(np.float64)  # [P, N]
        begin = records.begin_ns[is_new, None]
        last = np.maximum(0, records.last_ns[is_new] - begin)
        first = np.clip(records.first_ns[is_new] - begin, 0, last)
        is_dispatch = ~records.are_combines[is_new]
        return StepWaits(
            waits_s=(of_phase @ last).reshape(len(Phase), num_ranks) * _NS,
            first_s=(of_phase @ first).reshape(len(Phase), num_ranks) * _NS,
            own_s=of_phase @ np.maximum(0, own_ns[is_new]) * _NS,
            num_rows=int(records.num_rows[is_new][is_dispatch].sum()),
            num_transfers=int(is_new.sum()),
        )

    def _before(self, numbers: Ints) -> int:
        """Return the number before the oldest that is there, if its end is known; else itself."""
        oldest = int(numbers[0]) if len(numbers) else 0
        return self._number if self._number and self._number == oldest - 1 else oldest
