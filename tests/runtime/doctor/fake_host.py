"""A host laid out in a folder as the kernel would show it: PCI, GPUs, RDMA cards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GPU_KIND = ("0x10de", "0x2330")
NIC_KIND = ("0x15b3", "0x1021")


@dataclass(frozen=True, slots=True)
class FakeHost:
    """Two sockets; on each, switches that hold a GPU and a card."""

    root: Path

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def add_device(self, place: str, *, numa: int, kind: tuple[str, str], pci_class: str) -> Path:
        """A device at ``place``, as "pci0000:15/0000:15:01.0/0000:16:00.0"."""
        folder = f"sys/devices/{place}"
        files = {"numa_node": str(numa), "vendor": kind[0], "device": kind[1], "class": pci_class}
        for name, text in files.items():
            self.write(f"{folder}/{name}", text)
        link = self.root / "sys/bus/pci/devices" / place.rpartition("/")[2]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / folder)
        return self.root / folder

    def add_gpu(self, place: str, *, numa: int = 0) -> None:
        self.add_device(place, numa=numa, kind=GPU_KIND, pci_class="0x030200")
        address = place.rpartition("/")[2]
        count = len(list((self.root / "dev").glob("nvidia*")))
        self.write(f"dev/nvidia{count}", "")
        self.write(f"proc/driver/nvidia/gpus/{address}/information", "Model: \t\t NVIDIA H200")

    def add_nic(
        self,
        name: str,
        place: str,
        *,
        numa: int = 0,
        state: str = "4: ACTIVE",
        rate: int = 400,
        kind: tuple[str, str] = NIC_KIND,
    ) -> None:
        device = self.add_device(place, numa=numa, kind=kind, pci_class="0x020700")
        folder = f"sys/class/infiniband/{name}"
        self.write(f"{folder}/ports/1/state", state)
        self.write(f"{folder}/ports/1/rate", f"{rate} Gb/sec (4X NDR)")
        self.write(f"{folder}/ports/1/link_layer", "InfiniBand")
        (self.root / folder / "device").symlink_to(device)

    def add_driver(self, version: str = "580.65.06") -> None:
        self.write("sys/module/nvidia/version", version)

    @staticmethod
    def behind_switch(number: int) -> tuple[str, str]:
        """The places of a GPU and of a card behind switch ``number``, each on a root of its own."""
        root = f"pci0000:{number}5/0000:{number}5:01.0/0000:{number}6:00.0"
        return (
            f"{root}/0000:{number}7:00.0/0000:{number}8:00.0",
            f"{root}/0000:{number}7:01.0/0000:{number}9:00.0",
        )


def four_pairs(root: Path, **nics: dict[str, object]) -> FakeHost:
    """Four GPUs, each with its card behind a switch, two a socket; ``mlx5_N`` changes a card."""
    host = FakeHost(root)
    host.add_driver()
    for index in range(4):
        gpu, nic = host.behind_switch(index)
        host.add_gpu(gpu, numa=index // 2)
        changes = nics.get(f"mlx5_{index}", {})
        host.add_nic(f"mlx5_{index}", nic, numa=index // 2, **changes)  # type: ignore[arg-type]
    return host
