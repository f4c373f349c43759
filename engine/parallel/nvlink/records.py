"""What an exchange notes of each transfer: when every source's flags came, by this GPU's clock.

A ring of records in device memory, written by the kernels that wait, also where graphs replay them:
a transfer's is at its number modulo the slots. One program of a transfer writes its record, so
there are no atomics; it looks at the counters as all the others do, and its words are the clock
when it saw a source's first flag and its last. Who reads copies the ring out behind a step.

A record is int64 words, two and two more for each rank: number of the transfer * 2 + kind; rows
that this rank's experts got by it; then, by source, nanoseconds at its first flag and at its last.
This rank's own flags are there before it waits, so those say when its wait began.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.device_span import DeviceSpan
from engine.host_copy import HostCopies
from engine.parallel.device_waits import Records, StepSplitter, StepWaits, WaitReading

DISPATCH: Final = 0
COMBINE: Final = 1
"""Kinds of transfers."""

SLOTS: Final = 512
"""Of a ring: transfers of more than a step, of any model (61 layers have two each)."""


def make_ring(num_ranks: int, device: torch.device) -> Tensor:
    """Return a ring without records, [SLOTS, 2 + 2R] int64."""
    return torch.zeros(SLOTS, 2 + 2 * num_ranks, dtype=torch.int64, device=device)


def records_of(ring: Tensor, rank: int) -> Records:
    """Return the transfers whose records are in a ring, in their order.

    Args:
        ring: on the host.
        rank: whose it is.
    """
    words = ring.numpy()
    words = words[words[:, 0] > 0]
    words = words[np.argsort(words[:, 0])]
    return Records(
        numbers=words[:, 0] >> 1,
        are_combines=(words[:, 0] & 1) == COMBINE,
        num_rows=words[:, 1],
        begin_ns=words[:, 3 + 2 * rank],
        first_ns=words[:, 2::2],
        last_ns=words[:, 3::2],
    )


class RingReader:
    """See `engine.parallel.device_waits.DeviceWaits`."""

    def __init__(self, ring: Tensor, rank: int) -> None:
        """Read the ring of this rank."""
        self._ring, self._rank = ring, rank
        self._splitter = StepSplitter()
        self._span: DeviceSpan | None = None
        self._before: DeviceSpan | None = None

    def begin_step(self) -> None:
        """See `DeviceWaits`."""
        self._before, self._span = self._span, DeviceSpan.start(self._ring.device)

    def start_reading(self) -> WaitReading:
        """Copy all of the ring, some ten KB."""
        copies = HostCopies(self._ring.device)
        on_cpu = self._ring.device.type == "cpu"
        ring = self._ring.clone() if on_cpu else copies.add(self._ring)
        if self._span is not None:
            self._span.end()
        copies.close()
        return _Reading(ring, copies, self, self._span, self._before)

    def split(self, ring: Tensor) -> StepWaits:
        """Return what is new in a copy."""
        return self._splitter.take(records_of(ring, self._rank))


@dataclass(frozen=True, slots=True)
class _Reading:
    _ring: Tensor
    _copies: HostCopies
    _reader: RingReader
    _span: DeviceSpan | None
    _before: DeviceSpan | None

    @property
    def is_done(self) -> bool:
        return self._copies.is_done

    def take(self) -> StepWaits:
        self._copies.wait()
        found = self._reader.split(self._ring)
        if self._span is None or self._before is None:
            return found
        return replace(found, idle_s=self._span.gap_after(self._before))
