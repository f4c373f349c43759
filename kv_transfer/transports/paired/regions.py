"""Our registered regions, by label and by address. Pure bookkeeping; the engines do the real
registration.
"""

from __future__ import annotations

import threading

from kv_transfer.transport import MemoryRegion, RegionWrite


class RegionBook:
    """All regions of one transport. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[str, MemoryRegion] = {}

    def all(self) -> tuple[MemoryRegion, ...]:
        """Every region."""
        with self._lock:
            return tuple(self._regions.values())

    def add(self, region: MemoryRegion) -> None:
        """Take in ``region``.

        Raises:
            ValueError: no memory, the label is taken, or it overlaps another region.
        """
        if region.nbytes < 1 or region.address <= 0:
            raise ValueError(f"region {region.label!r}: no memory")
        with self._lock:
            if region.label in self._regions:
                raise ValueError(f"region {region.label!r} is registered already")
            for other in self._regions.values():
                if (
                    region.address < other.address + other.nbytes
                    and other.address < region.address + region.nbytes
                ):
                    raise ValueError(f"region {region.label!r} overlaps region {other.label!r}")
            self._regions[region.label] = region

    def remove(self, label: str) -> MemoryRegion:
        """Forget a region and return it.

        Raises:
            ValueError: there is none.
        """
        with self._lock:
            region = self._regions.pop(label, None)
        if region is None:
            raise ValueError(f"region {label!r} is not registered")
        return region

    def source_of(self, write: RegionWrite) -> MemoryRegion:
        """The region that ``write`` reads.

        Raises:
            ValueError: its source is not inside one region.
        """
        for region in self.all():
            start = write.src_address - region.address
            if start >= 0 and start + write.nbytes <= region.nbytes:
                return region
        raise ValueError(f"source {write.src_address:#x} + {write.nbytes} is not registered")
