"""The processes of a run, found by the mark in their environment, whoever started them.

Every process of a run, Ray's daemons included, inherits ``TANDEM_CLUSTER=<run id>``. What still
bears the mark after an orderly stop is killed, also after a crash of the controller.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

import psutil

from deploy.plan import RUN_ID_VARIABLE


def find_processes(run_id: str) -> list[psutil.Process]:
    """The living processes of ``run_id``, without the caller; zombies do not count."""
    mark = f"{RUN_ID_VARIABLE}={run_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError, psutil.Error):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                process = psutil.Process(int(entry.name))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def kill_processes(run_id: str, timeout_s: float = 5.0) -> int:
    """Kill every process of ``run_id``; how many there were. Returns when they are gone."""
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while processes := find_processes(run_id):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed.add(process.pid)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return len(killed)


def ray_folder(run_id: str) -> Path:
    """What Ray has of a run lies below, for this user alone.

    Short, for a socket's path has 107 bytes.
    """
    return Path("/tmp") / f"tandem-{run_id}"


def ray_temp_dir(run_id: str) -> Path:
    """Where Ray keeps its sockets and logs: Ray opens it to everybody, but not the one above."""
    return ray_folder(run_id) / "r"


def clean_up(run_id: str) -> int:
    """Kill every process of ``run_id`` and remove Ray's files; how many processes there were."""
    num_killed = kill_processes(run_id)
    shutil.rmtree(ray_folder(run_id), ignore_errors=True)
    return num_killed


def wait_until_gone(pid: int, timeout_s: float) -> bool:
    """Whether process ``pid`` (not a child of the caller) ends within ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while is_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_alive(pid: int) -> bool:
    """Whether process ``pid`` runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def memory_of(processes: list[psutil.Process]) -> tuple[int, int]:
    """Bytes of ``processes`` together: (proportional set size, sum of resident set sizes).

    Pages shared by several processes count once in the first figure and once per process in the
    second. A process that ends meanwhile counts nothing.
    """
    proportional = resident = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            memory = process.memory_full_info()
            proportional += memory.pss
            resident += memory.rss
    return proportional, resident
