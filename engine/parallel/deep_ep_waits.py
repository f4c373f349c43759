"""What DeepEP's low-latency kernels count of their waits, as the waits of a step.

Each program that receives adds the clock cycles that it waited to a number of its source; there is
one program for each source and local expert, so a sum divided by the local experts is what a mean
program waited. The library also counts rows by local expert. Both go on in captured graphs, and
cost a copy of some hundred bytes behind a step.

What a rank did by itself before a wait nobody counts, and so not the attention apart from the
experts. What a step took on the device less all waits is its own work, here half of it each; which
half it was is told by where the others waited. Cycles are of a clock that changes: they are made
seconds by the most that it runs at, so a wait is rather told too short.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.device_span import DeviceSpan
from engine.host_copy import HostCopies
from engine.parallel.device_waits import StepWaits, WaitReading
from runtime.stragglers.rank_waits import Phase

_CYCLES_PER_SECOND: Final = 1.98e9
"""Of a Hopper GPU, at most."""
_WRAP: Final = 2**32
"""Rows are counted in 32 bits."""

Ints = npt.NDArray[np.int64]


class WaitCosts:
    """What the kernels of one rank add to, and who reads it: see `DeviceWaits`.

    Attributes:
        dispatch_R: int64 cycles by source.
        combine_R: int64 cycles by source.
        rows_L: int32 rows by local expert.
    """

    def __init__(self, num_ranks: int, num_local_experts: int, device: torch.device) -> None:
        """Count from nothing."""
        self.dispatch_R, self.combine_R = torch.zeros(
            2, num_ranks, dtype=torch.int64, device=device
        )
        self.rows_L = torch.zeros(num_local_experts, dtype=torch.int32, device=device)
        self._before: Ints | None = None
        self._span: DeviceSpan | None = None
        self._last: DeviceSpan | None = None

    def begin_step(self) -> None:
        """See `DeviceWaits`."""
        self._last, self._span = self._span, DeviceSpan.start(self.rows_L.device)

    def start_reading(self) -> WaitReading:
        """See `DeviceWaits`."""
        copies = HostCopies(self.rows_L.device)
        told = torch.cat([self.dispatch_R, self.combine_R, self.rows_L.long()])
        host = copies.add(told)
        if self._span is not None:
            self._span.end()
        copies.close()
        return _Reading(host, copies, self, self._span, self._last)

    def since(self, told: Tensor, device_s: float) -> StepWaits:
        """Return what was counted since the reading before; nothing for the first one.

        Args:
            told: of the reading, on the host.
            device_s: that the step took on the device; 0 if that is not known.
        """
        now = told.numpy().copy()
        num_ranks, num_local = len(self.dispatch_R), len(self.rows_L)
        before = now if self._before is None else self._before
        self._before = now
        more = now - before
        waits = np.zeros((len(Phase), num_ranks))
        cycles = more[: 2 * num_ranks].reshape(2, num_ranks)
        waits[[Phase.DISPATCH, Phase.COMBINE]] = cycles / num_local / _CYCLES_PER_SECOND
        own = np.zeros(len(Phase))
        half = 0.5 * max(0.0, device_s - float(waits.max(axis=1).sum()))
        own[[Phase.DISPATCH, Phase.COMBINE]] = half
        return StepWaits(
            waits_s=waits,
            first_s=waits,
            own_s=own,
            num_rows=int((more[2 * num_ranks :] % _WRAP).sum()),
            num_transfers=0,
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    _told: Tensor
    _copies: HostCopies
    _costs: WaitCosts
    _span: DeviceSpan | None
    _last: DeviceSpan | None

    @property
    def is_done(self) -> bool:
        return self._copies.is_done

    def take(self) -> StepWaits:
        self._copies.wait()
        if self._span is None:
            return self._costs.since(self._told, 0.0)
        found = self._costs.since(self._told, self._span.seconds())
        idle_s = 0.0 if self._last is None else self._span.gap_after(self._last)
        return replace(found, idle_s=idle_s)
