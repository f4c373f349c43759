"""CUDA devices of this machine, counted and named without loading any CUDA library."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Environment of processes with GPUs: multicast is never used."""


def count_devices() -> int:
    """CUDA devices of this machine that we may use."""
    present = len([entry for entry in Path("/dev").glob("nvidia*") if entry.name[6:].isdigit()])
    return min(present, len(visible_devices(os.environ, present)))


def visible_devices(environment: Mapping[str, str], count: int) -> list[str]:
    """The names of the CUDA devices that we may use, in order."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(number) for number in range(count)]
    return [name.strip() for name in listed.split(",") if name.strip()]


def rotate(names: Sequence[str], first: int) -> list[str]:
    """``names`` from number ``first`` on, then those before it."""
    return [*names[first:], *names[:first]]
