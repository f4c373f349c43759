"""What was measured on: devices, clocks, versions, and the command, so that a figure can be redone.

Clocks are read by ``nvidia-smi`` while the device is busy: a figure at lower clocks is another one.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata

import torch

_PACKAGES = (
    "torch",
    "triton",
    "sgl-deep-gemm",
    "sgl-deep-ep",
    "sgl-flash-mla",
    "flash-attn-4",
    "nvidia-nccl-cu13",
    "nixl-cu13",
)
_QUERY = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "temperature.gpu")


def describe_machine(device: str, world_size: int) -> dict[str, object]:
    """The host, its devices and the versions of what ran."""
    devices = [torch.cuda.get_device_name(0)] * world_size if device == "cuda" else ["CPU"]
    return {
        "devices": devices,
        "num_cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": _versions(),
        "driver": _ask_driver("driver_version") if device == "cuda" else None,
    }


def describe_command() -> dict[str, object]:
    """The command line, and the commit of a source tree (None where there is none)."""
    return {"command": shlex.join(["python", "-m", "deploy", *sys.argv[1:]]), "commit": _commit()}


def read_clocks() -> list[dict[str, str]]:
    """Clocks (MHz), power (W) and temperature (C) of each device, now."""
    lines = _ask_driver(",".join(_QUERY)) or ""
    return [
        dict(zip(_QUERY, (value.strip() for value in line.split(",")), strict=False))
        for line in lines.splitlines()
    ]


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {**found, "torch": torch.__version__}


def _ask_driver(query: str) -> str | None:
    return _run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"])


def _commit() -> str | None:
    commit = _run(["git", "rev-parse", "HEAD"])
    if commit is None:
        return None
    return commit + "+changes" if _run(["git", "status", "--porcelain", "-uno"]) else commit


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
