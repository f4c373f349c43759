"""Network cards that do RDMA, and their ports that are down or slower than those of their likes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.doctor.finding import Finding, Verdict, read_text
from runtime.doctor.pci import PciDevice, read_device

_CHECK = "RDMA"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port of a card."""

    number: int
    state: str
    """ACTIVE, DOWN, INIT, ARMED."""
    rate: float
    """Gb/s; 0: not known."""
    link_layer: str = ""
    """InfiniBand or Ethernet."""

    @property
    def is_active(self) -> bool:
        """Whether it carries data."""
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One card, as its RDMA device."""

    name: str
    """For example mlx5_0."""
    device: PciDevice
    ports: tuple[Port, ...]

    @property
    def rate(self) -> float:
        """Gb/s of its ports that are up."""
        return max((port.rate for port in self.ports if port.is_active), default=0.0)

    @property
    def is_active(self) -> bool:
        """Whether any port is up."""
        return any(port.is_active for port in self.ports)


def read_nics(root: Path) -> list[Nic]:
    """The cards of a host, in the order of their names."""
    folder = root / "sys/class/infiniband"
    entries = sorted(folder.iterdir(), key=_natural) if folder.is_dir() else []
    return [
        Nic(
            name=entry.name,
            device=read_device(entry / "device"),
            ports=tuple(_read_ports(entry / "ports")),
        )
        for entry in entries
    ]


def _read_ports(folder: Path) -> Iterator[Port]:
    for entry in sorted(folder.iterdir(), key=_natural) if folder.is_dir() else []:
        rate = re.match(r"[\d.]+", read_text(entry / "rate"))  # "400 Gb/sec (4X NDR)"
        yield Port(
            number=int(entry.name),
            state=read_text(entry / "state").partition(":")[2].strip(),  # "4: ACTIVE"
            rate=float(rate[0]) if rate else 0.0,
            link_layer=read_text(entry / "link_layer"),
        )


def _natural(path: Path) -> tuple[str, int]:
    digits = re.search(r"\d+$", path.name)
    return (path.name[: digits.start()], int(digits[0])) if digits else (path.name, -1)


def check_ports(nics: Sequence[Nic]) -> Iterator[Finding]:
    """Ports that are down, and ports that are slower than those of cards of the same kind."""
    if not nics:
        text = "no RDMA device in /sys/class/infiniband: KV travels over TCP"
        yield Finding(check=_CHECK, verdict=Verdict.NOTE, text=text)
        return
    is_any_wrong = False
    for nic in nics:
        usual = max(other.rate for other in nics if other.device.kind == nic.device.kind)
        for port in nic.ports:
            for finding in _check_port(nic, port, usual):
                is_any_wrong = True
                yield finding
        for finding in check_link(_CHECK, nic.name, nic.device, with_speed=True):
            is_any_wrong = True
            yield finding
    if not is_any_wrong:
        rates = ", ".join(f"{nic.name} {nic.rate:g} Gb/s" for nic in nics)
        yield Finding(check=_CHECK, verdict=Verdict.OK, text=f"all ports are up: {rates}")


def _check_port(nic: Nic, port: Port, usual: float) -> Iterator[Finding]:
    name = f"{nic.name} port {port.number}"
    if not port.is_active:
        state = port.state or "unknown"
        yield Finding(
            check=_CHECK,
            verdict=Verdict.WARNING,
            text=f"{name} is {state}: nothing travels over it",
            fix="look at the cable, the switch port and, for InfiniBand, the subnet manager",
        )
    elif port.rate < usual:
        yield Finding(
            check=_CHECK,
            verdict=Verdict.WARNING,
            text=f"{name} runs at {port.rate:g} Gb/s, cards of its kind here at {usual:g} Gb/s",
            fix="look at the cable and at the speed of the switch port",
        )


def check_link(check: str, name: str, device: PciDevice, *, with_speed: bool) -> Iterator[Finding]:
    """A PCIe link that has come up narrower or slower than the device can.

    ``with_speed`` is for devices that do not slow down when idle, as GPUs do.
    """
    is_narrow = 0 < device.link_width < device.max_link_width
    is_slow = with_speed and 0 < device.link_speed < device.max_link_speed
    if is_narrow or is_slow:
        now = f"x{device.link_width} at {device.link_speed:g} GT/s"
        most = f"x{device.max_link_width} at {device.max_link_speed:g} GT/s"
        yield Finding(
            check=check,
            verdict=Verdict.WARNING,
            text=f"the PCIe link of {name} ({device.address}) is {now}, it can {most}",
            fix="seat the card anew, or look at the slot's settings in the firmware",
        )
