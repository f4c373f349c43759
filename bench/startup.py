"""Measures how long ``tandem up`` takes to ready, and the memory of all processes then.

A whole cluster of its own is started and stopped, with free ports and a temporary run directory,
through the same command that a person types.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

import deploy
from deploy.errors import ClusterError
from deploy.running.sweep import find_processes, memory_of
from deploy.state import run_dir_of
from runtime.config import ClusterConfig
from runtime.config.file import dump_config


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupResult:
    """One measured start."""

    seconds_to_ready: float
    """From the command's start to its return, the interpreter's start included."""
    pss_bytes: int
    """Memory of all processes of the cluster, shared pages once (proportional set size)."""
    rss_bytes: int
    """Sum of resident set sizes: shared pages once per process."""
    num_processes: int
    seconds_to_stop: float
    num_cores: int
    machine: str


def measure_startup(config: ClusterConfig) -> StartupResult:
    """Start ``config`` once, measure, stop it.

    Raises:
        ClusterError: it does not start or stop.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(dump_config(_isolated(config, folder)), encoding="utf-8")
        began = time.perf_counter()
        _tandem("up", "--detach", str(path))
        ready_s = time.perf_counter() - began
        try:
            state = run_dir_of(config.cluster.name, folder).read_state()
            assert state is not None
            processes = [*find_processes(state.run_id), psutil.Process(state.pid)]
            pss, rss = memory_of(processes)
        finally:
            began = time.perf_counter()
            _tandem("down", "--config", str(path))
            stop_s = time.perf_counter() - began
    return StartupResult(
        seconds_to_ready=round(ready_s, 2),
        pss_bytes=pss,
        rss_bytes=rss,
        num_processes=len(processes),
        seconds_to_stop=round(stop_s, 2),
        num_cores=len(os.sched_getaffinity(0)),
        machine=platform.machine(),
    )


def _isolated(config: ClusterConfig, folder: str) -> ClusterConfig:
    return dataclasses.replace(
        config,
        cluster=dataclasses.replace(config.cluster, run_dir=folder),
        router=dataclasses.replace(config.router, port=0, control_port=0),
    )


def _tandem(*arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "deploy", *arguments],
        cwd=Path(deploy.__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise ClusterError(f"tandem {arguments[0]} failed:\n{result.stdout}{result.stderr}".strip())
