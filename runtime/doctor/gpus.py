"""GPUs of a host and their driver, from what the kernel says; nothing of CUDA is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.doctor.finding import Finding, Verdict, read_text
from runtime.doctor.pci import PciDevice, read_device
from runtime.doctor.rdma import check_link

_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")
_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The major version of the driver that a major version of CUDA needs."""
_CHECK = "GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, numbered in the order of PCI addresses, as CUDA numbers equal ones."""

    index: int
    device: PciDevice
    model: str = ""


def read_gpus(root: Path) -> list[Gpu]:
    """Those that the driver shows us, which in a container are those that it was given."""
    devices = root / "sys/bus/pci/devices"
    shown = root / "proc/driver/nvidia/gpus"
    if shown.is_dir():
        addresses = sorted(entry.name for entry in shown.iterdir())
    else:
        entries = sorted(devices.iterdir()) if devices.is_dir() else []
        addresses = [entry.name for entry in entries if _is_gpu(entry)]
    return [
        Gpu(
            index=index,
            device=read_device(devices / address),
            model=_model(read_text(shown / address / "information")),
        )
        for index, address in enumerate(addresses)
    ]


def _is_gpu(folder: Path) -> bool:
    is_nvidia = read_text(folder / "vendor") == _NVIDIA
    return is_nvidia and read_text(folder / "class")[:6] in _GPU_CLASSES


def _model(information: str) -> str:
    found = re.search(r"^Model:\s*(.+)$", information, re.MULTILINE)
    return found[1].strip() if found else ""


def driver_version(root: Path) -> str:
    """Of NVIDIA's kernel module; empty where it is not loaded."""
    if version := read_text(root / "sys/module/nvidia/version"):
        return version
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", read_text(root / "proc/driver/nvidia/version"))
    return found[1] if found else ""


def visible_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves, where it has plain numbers."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return list(gpus)
    numbers = [entry.strip() for entry in given.split(",") if entry.strip()]
    if not all(number.isdigit() for number in numbers):
        return list(gpus)  # by their UUIDs
    return [gpus[int(number)] for number in numbers if int(number) < len(gpus)]


def check_gpus(root: Path, gpus: Sequence[Gpu], *, wanted: bool) -> Iterator[Finding]:
    """Whether there are GPUs with a driver and device files; ``wanted``: without them is no use."""
    driver = driver_version(root)
    nodes = [entry for entry in (root / "dev").glob("nvidia*") if entry.name[6:].isdigit()]
    lacking = Verdict.ERROR if wanted else Verdict.WARNING
    if not gpus:
        verdict = Verdict.ERROR if wanted else Verdict.NOTE
        fix = (
            'run on a GPU host, or set prefill.device and decode.device to "cpu"' if wanted else ""
        )
        yield Finding(check=_CHECK, verdict=verdict, text="no NVIDIA GPU is here", fix=fix)
    elif not driver:
        text = f"{len(gpus)} GPUs, and NVIDIA's driver is not loaded"
        yield Finding(
            check=_CHECK, verdict=lacking, text=text, fix="install it, or modprobe nvidia"
        )
    elif not nodes:
        fix = "give the container its GPUs (--gpus all, or nvidia.com/gpu in Kubernetes)"
        text = f"{len(gpus)} GPUs, and no /dev/nvidia0: CUDA sees none of them"
        yield Finding(check=_CHECK, verdict=lacking, text=text, fix=fix)
    else:
        models = ", ".join(sorted({gpu.model for gpu in gpus if gpu.model})) or "NVIDIA"
        text = f"{len(gpus)} x {models}, driver {driver}"
        yield Finding(check=_CHECK, verdict=Verdict.OK, text=text)
        if len(nodes) < len(gpus):
            few = f"{len(gpus)} GPUs, device files of {len(nodes)} only"
            fix = "nothing, where the container was to have so many; else give it all"
            yield Finding(check=_CHECK, verdict=Verdict.NOTE, text=few, fix=fix)
    for gpu in gpus:
        yield from check_link(_CHECK, f"GPU {gpu.index}", gpu.device, with_speed=False)


def check_driver(root: Path, cuda_major: int | None) -> Iterator[Finding]:
    """Whether the driver is new enough for the CUDA that our libraries were built with."""
    driver = driver_version(root)
    if not driver or cuda_major not in _LEAST_DRIVER:
        return
    least = _LEAST_DRIVER[cuda_major]
    if int(driver.partition(".")[0]) < least:
        yield Finding(
            check="driver",
            verdict=Verdict.WARNING,
            text=f"driver {driver}, and CUDA {cuda_major} needs {least} or newer",
            fix=f"install driver {least} or newer, or the cuda-compat package of CUDA {cuda_major}",
        )
    else:
        text = f"driver {driver} is new enough for CUDA {cuda_major}"
        yield Finding(check="driver", verdict=Verdict.OK, text=text)
