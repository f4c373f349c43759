"""Clocks, power and temperature of the GPUs of a measurement, while they are busy.

A figure at lower clocks is another one, and a GPU at its power limit lowers its clocks within
seconds, so both ends of a measurement are looked at. ``nvidia-smi`` is asked: it is there wherever
the driver is, and its answer takes the measuring process nothing but the wait.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from bench.engine.report import Report

FIELDS: Mapping[str, str] = {
    "sm_mhz": "clocks.sm",
    "max_sm_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}
"""Our names of what is asked, and ``nvidia-smi``'s."""
_TIMEOUT_S = 20.0


def read_clocks(uuids: Sequence[str]) -> Report:
    """Ask for the GPUs with these ids.

    Returns:
        ``gpus``, one mapping of `FIELDS` each in the order of ``uuids`` (None for a number that a
        GPU does not tell), or None and ``why``.
    """
    if not uuids:
        return {"gpus": None, "why": "a CPU has no clocks and no power that we could read"}
    command = ["nvidia-smi", f"--query-gpu=uuid,{','.join(FIELDS.values())}"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except FileNotFoundError:
        return {"gpus": None, "why": "nvidia-smi is not installed"}
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip()
        return {"gpus": None, "why": f"nvidia-smi ended with {error.returncode}: {said}"}
    except subprocess.TimeoutExpired:
        return {"gpus": None, "why": f"nvidia-smi took more than {_TIMEOUT_S:g} s"}
    found = parse_clocks(done.stdout)
    missing = [uuid for uuid in uuids if _bare(uuid) not in found]
    if missing:
        return {"gpus": None, "why": f"nvidia-smi does not list {', '.join(missing)}"}
    return {"gpus": [found[_bare(uuid)] for uuid in uuids], "why": None}


def parse_clocks(text: str) -> dict[str, dict[str, float | None]]:
    """The answer of ``nvidia-smi``, by the GPUs' ids without their prefix."""
    found = {}
    for line in text.splitlines():
        uuid, *values = (part.strip() for part in line.split(","))
        if len(values) == len(FIELDS):
            found[_bare(uuid)] = dict(zip(FIELDS, map(_number, values), strict=True))
    return found


def _bare(uuid: str) -> str:
    """``nvidia-smi`` writes GPU- before what CUDA tells."""
    return uuid.removeprefix("GPU-").lower()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # such as [N/A]
        return None
