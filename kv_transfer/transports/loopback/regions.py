"""Registered memory of a loopback transport: found by label, by the key that peers write with, or
by address.

Views are made once per region over memory that its owner keeps alive; slicing one copies nothing.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.transport import MemoryRegion, RegionWrite
from kv_transfer.transports.loopback.endpoint import KEY_BYTES, RemoteRegion
from kv_transfer.transports.loopback.wire import WriteHeader


@dataclass(frozen=True, slots=True)
class _Registered:
    region: MemoryRegion
    key: bytes
    view: memoryview


class RegionTable:
    """All registered regions. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_label: dict[str, _Registered] = {}
        self._by_key: dict[bytes, _Registered] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all regions."""
        with self._lock:
            return sum(registered.region.nbytes for registered in self._by_label.values())

    def add(self, region: MemoryRegion) -> None:
        """Register ``region``.

        Raises:
            ValueError: the label is taken, or the region overlaps another.
        """
        start, end = region.address, region.address + region.nbytes
        if region.nbytes < 1 or region.address <= 0:
            raise ValueError(f"region {region.label!r}: no memory")
        view = memoryview((ctypes.c_ubyte * region.nbytes).from_address(region.address)).cast("B")
        registered = _Registered(region, secrets.token_bytes(KEY_BYTES), view)
        with self._lock:
            if region.label in self._by_label:
                raise ValueError(f"region {region.label!r} is registered already")
            for other in (entry.region for entry in self._by_label.values()):
                if start < other.address + other.nbytes and other.address < end:
                    raise ValueError(f"region {region.label!r} overlaps region {other.label!r}")
            self._by_label[region.label] = self._by_key[registered.key] = registered

    def remove(self, label: str) -> None:
        """Forget a region; writes with its key are refused from now on."""
        with self._lock:
            registered = self._by_label.pop(label, None)
            if registered is None:
                raise ValueError(f"region {label!r} is not registered")
            del self._by_key[registered.key]

    def remote_regions(self) -> dict[str, RemoteRegion]:
        """What peers need to write, by label."""
        with self._lock:
            return {
                label: RemoteRegion(entry.key, entry.region.nbytes)
                for label, entry in self._by_label.items()
            }

    def source(self, write: RegionWrite) -> memoryview:
        """The bytes that ``write`` sends.

        Raises:
            ValueError: they are not inside one registered region.
        """
        with self._lock:
            for entry in self._by_label.values():
                start = write.src_address - entry.region.address
                if start >= 0 and start + write.nbytes <= entry.region.nbytes:
                    return entry.view[start : start + write.nbytes]
        raise ValueError(f"source {write.src_address:#x} + {write.nbytes} is not registered")

    def targets(self, writes: Sequence[WriteHeader]) -> list[memoryview] | str:
        """Where a peer's writes go, or why all of them are refused."""
        views = []
        with self._lock:
            for write in writes:
                entry = self._by_key.get(write.key)
                if entry is None:
                    return "no region has this access key"
                end = write.offset + write.nbytes
                if end > entry.region.nbytes:
                    return (
                        f"write of [{write.offset}, {end}) is outside of region "
                        f"{entry.region.label!r} with {entry.region.nbytes} bytes"
                    )
                views.append(entry.view[write.offset : end])
        return views
