"""Where devices sit on PCI, and how far two of them are from each other.

From the paths of sysfs: /sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/... names the root
complex and each bridge on the way down to a device.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from pathlib import Path

from runtime.doctor.finding import read_number, read_text

_STEP = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class Distance(enum.IntEnum):
    """What data between two devices has to cross; less is better."""

    SWITCH = 0
    """A PCIe switch or bridge that both hang on (nvidia-smi: PIX, PXB)."""
    ROOT_COMPLEX = 1
    """The root complex of both (PHB)."""
    NUMA = 2
    """The interconnect within one NUMA node (NODE)."""
    SYSTEM = 3
    """The interconnect between NUMA nodes (SYS)."""

    @property
    def text(self) -> str:
        """For a person."""
        return (
            "on the same PCIe switch",
            "on the same root complex",
            "in the same NUMA node",
            "across NUMA nodes",
        )[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """One device."""

    path: tuple[str, ...]
    """Root complex, bridges, and last its own address; empty for what is not on PCI."""
    numa_node: int
    """-1: not known."""
    kind: str
    """"vendor:device", in hexadecimal digits."""
    link_width: int = 0
    """Lanes in use; 0: not known."""
    max_link_width: int = 0
    link_speed: float = 0.0
    """GT/s of a lane; 0: not known."""
    max_link_speed: float = 0.0

    @property
    def address(self) -> str:
        """Domain, bus, device and function."""
        return self.path[-1] if self.path else ""

    def distance_to(self, other: PciDevice) -> Distance:
        """How far ``other`` is."""
        common = 0
        for mine, theirs in zip(self.path, other.path, strict=False):
            if mine != theirs:
                break
            common += 1
        if common > 1:
            return Distance.SWITCH
        # One root complex of a virtual machine may hold devices of several NUMA nodes.
        is_known = self.numa_node >= 0 and other.numa_node >= 0
        if is_known and self.numa_node != other.numa_node:
            return Distance.SYSTEM
        if common == 1:
            return Distance.ROOT_COMPLEX
        return Distance.NUMA if is_known else Distance.SYSTEM


def read_device(folder: Path) -> PciDevice:
    """The device of a folder of sysfs, or of a link to one."""
    whole = folder.resolve()
    speeds = [_gigatransfers(whole / f"{name}_link_speed") for name in ("current", "max")]
    return PciDevice(
        path=tuple(part for part in whole.parts if _STEP.fullmatch(part)),
        numa_node=read_number(whole / "numa_node", -1),
        kind=":".join(read_text(whole / name).removeprefix("0x") for name in ("vendor", "device")),
        link_width=read_number(whole / "current_link_width", 0),
        max_link_width=read_number(whole / "max_link_width", 0),
        link_speed=speeds[0],
        max_link_speed=speeds[1],
    )


def _gigatransfers(path: Path) -> float:
    found = re.match(r"[\d.]+", read_text(path))  # "32.0 GT/s PCIe", "Unknown"
    return float(found[0]) if found else 0.0
