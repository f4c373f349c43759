"""Limits of the processes of a host, its shared memory, its processors."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.doctor.finding import Finding, Verdict, read_text

OPEN_FILES_OF_RANK = 4096
"""Sockets of peers and other ranks, files of the checkpoint, shared memory."""
_SHARED_BYTES = 1 << 30
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a process may have; -1 for no limit."""

    max_open_files: int
    max_locked_bytes: int
    shared_bytes: int
    """The size of /dev/shm; 0 where there is none."""


def read_limits(root: Path) -> Limits:
    """Those of this process; open files up to the hard limit, which ours raise themselves."""
    try:
        shared = os.statvfs(root / "dev/shm")
        shared_bytes = shared.f_frsize * shared.f_blocks
    except OSError:
        shared_bytes = 0
    return Limits(
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        max_locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shared_bytes=shared_bytes,
    )


def check_limits(
    limits: Limits, *, num_files: int, has_rdma: bool, has_gpus: bool
) -> Iterator[Finding]:
    """Limits that something here will meet, a process that opens ``num_files`` for one."""
    files = limits.max_open_files
    if 0 <= files < num_files:
        yield Finding(
            check="open files",
            verdict=Verdict.WARNING,
            text=f"at most {files} a process, {num_files} may be needed: a connection is a file",
            fix=f"ulimit -n {num_files}, LimitNOFILE= in systemd, or --ulimit nofile in Docker",
        )
    else:
        text = "no limit" if files < 0 else f"at most {files} a process"
        yield Finding(check="open files", verdict=Verdict.OK, text=text)
    locked = limits.max_locked_bytes
    if has_rdma and locked >= 0:
        yield Finding(
            check="locked memory",
            verdict=Verdict.WARNING,
            text=f"at most {locked // 1024} KiB: RDMA cannot register KV in host memory",
            fix="ulimit -l unlimited, LimitMEMLOCK=infinity, or the capability IPC_LOCK",
        )
    elif has_rdma:
        yield Finding(check="locked memory", verdict=Verdict.OK, text="no limit")
    shared = limits.shared_bytes
    if shared < _SHARED_BYTES:
        # Ray's objects and, on GPUs, NCCL's buffers between ranks are there.
        verdict = Verdict.WARNING if has_gpus else Verdict.NOTE
        text = f"/dev/shm has {shared / 2**20:.0f} MiB"
        fix = "--shm-size 16g in Docker, an emptyDir with medium: Memory in Kubernetes"
        yield Finding(check="shared memory", verdict=verdict, text=text, fix=fix)
    else:
        text = f"/dev/shm has {shared / _GIB:.1f} GiB"
        yield Finding(check="shared memory", verdict=Verdict.OK, text=text)


def check_host(root: Path, num_cpus: int) -> Iterator[Finding]:
    """Processors, memory and NUMA nodes."""
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    total = re.search(r"MemTotal:\s+(\d+) kB", read_text(root / "proc/meminfo"))
    memory = f", {int(total[1]) * 1024 / _GIB:.0f} GiB of memory" if total else ""
    numa = f"{len(nodes)} NUMA nodes" if len(nodes) > 1 else "1 NUMA node"
    text = f"{num_cpus} processors{memory}, {numa}"
    yield Finding(check="host", verdict=Verdict.NOTE, text=text)
    if len(nodes) > 1 and read_text(root / "proc/sys/kernel/numa_balancing") == "1":
        yield Finding(
            check="host",
            verdict=Verdict.NOTE,
            text="the kernel moves pages between NUMA nodes, which makes steps uneven",
            fix="sysctl kernel.numa_balancing=0 on GPU hosts",
        )
