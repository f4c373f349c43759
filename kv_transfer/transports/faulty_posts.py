"""The posts of a faulty transport, and what is done to their writes. No I/O of its own."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.transport import MemoryRegion, RegionWrite, TransferHandle
from runtime.errors import TandemError
from runtime.faults import Fault


@dataclass(frozen=True, slots=True)
class PlannedPost:
    """What a chooser of faults sees: ``index`` counts the posts of this transport from 0."""

    index: int
    peer: str
    writes: tuple[RegionWrite, ...]
    notify: bytes | None


@dataclass(slots=True, kw_only=True)
class FaultyPost:
    """One post between ``post`` and ``release``.

    ``handed_on`` are posts of the inner transport, whose states make up ours. The end is not told
    before ``told_at`` (monotonic seconds), and is ``ends_as`` where that is set.
    """

    handle: TransferHandle
    planned: PlannedPost
    fault: Fault | None
    handed_on: list[TransferHandle] = field(default_factory=list)
    told_at: float = 0.0
    ends_as: TandemError | None = None


class SourceCopy:
    """The bytes of some writes as they are now, in memory of their own.

    A FAILED post may not read its source any more, so what lands later is read from here. Keep it
    until that post is over.
    """

    def __init__(self, label: str, writes: Sequence[RegionWrite]) -> None:
        self._memory = mmap.mmap(-1, max(1, sum(write.nbytes for write in writes)))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.region = MemoryRegion(label, address, len(self._memory))
        self.writes: list[RegionWrite] = []
        offset = 0
        for write in writes:
            ctypes.memmove(address + offset, write.src_address, write.nbytes)
            self.writes.append(write._replace(src_address=address + offset))
            offset += write.nbytes


def first_half(writes: Sequence[RegionWrite]) -> list[RegionWrite]:
    """The leading writes with half of all bytes, the last of them cut."""
    left = sum(write.nbytes for write in writes) // 2
    kept: list[RegionWrite] = []
    for write in writes:
        if left <= 0:
            break
        kept.append(write._replace(nbytes=min(write.nbytes, left)))
        left -= write.nbytes
    return kept
