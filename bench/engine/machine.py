"""What was measured on: devices, versions, and the command, so that a figure can be redone."""

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


def device_uuids(device: str, world_size: int) -> list[str]:
    """The ids of the GPUs of a launch on this host; none on a CPU."""
    if device != "cuda":
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(world_size)]


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
