"""CUDA devices of this machine, counted and named without loading any CUDA library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


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
