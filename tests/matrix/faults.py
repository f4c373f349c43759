"""What a fault does to a process, or to the network and the disk of the runner's namespaces.

The network is the loopback of a network namespace in which the cluster is alone, and the disk a
small tmpfs in a mount namespace: cutting and filling them is real, and harms nobody else. Memory is
`RLIMIT_AS` of the process. The clock is the one that Python code of the process reads, as a host's
clock cannot be set for one process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.matrix.cells import Fault

STOP_S = 5.0
CUT_S = 3.0
DISK_MIB = 64
NAMESPACED = frozenset({Fault.CUT, Fault.SLOW_LINK, Fault.FULL_DISK})
"""Need root, for namespaces."""
LETHAL = frozenset({Fault.KILL, Fault.TERMINATE, Fault.STOP_FOR_EVER})
_SLOW = "tbf rate 16mbit burst 64kb latency 400ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A fault as it is brought about, and taken back when all is answered.

    Attributes:
        apply: to the process of that pid; it stands at its moment.
        lift: from it, if it still lives.
        word: what the process is told before it goes on.
    """

    apply: Callable[[int, Path], None]
    lift: Callable[[int, Path], None] = lambda pid, folder: None
    word: bytes = b"go"


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _stop_a_while(pid: int) -> None:
    _signal(pid, signal.SIGSTOP)
    time.sleep(STOP_S)
    _signal(pid, signal.SIGCONT)


def _tc(arguments: str) -> None:
    subprocess.run(["tc", "qdisc", *arguments.split()], check=True, capture_output=True)


def _cut() -> None:
    _tc("replace dev lo root blackhole")
    time.sleep(CUT_S)
    _tc("del dev lo root")


def _fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _take_memory(pid: int) -> None:
    """What the process has is all that it gets."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))


def _give_memory(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (hard, hard))


INJECTIONS: dict[Fault, Injection] = {
    Fault.KILL: Injection(apply=lambda pid, _: _signal(pid, signal.SIGKILL)),
    Fault.STOP_A_WHILE: Injection(apply=lambda pid, _: _stop_a_while(pid)),
    Fault.STOP_FOR_EVER: Injection(
        apply=lambda pid, _: _signal(pid, signal.SIGSTOP),
        lift=lambda pid, _: _signal(pid, signal.SIGKILL),
    ),
    Fault.TERMINATE: Injection(apply=lambda pid, _: _signal(pid, signal.SIGTERM)),
    Fault.CUT: Injection(apply=lambda *_: _cut()),
    Fault.SLOW_LINK: Injection(
        apply=lambda *_: _tc(f"replace dev lo root {_SLOW}"),
        lift=lambda *_: _tc("del dev lo root"),
    ),
    Fault.FULL_DISK: Injection(
        apply=lambda _, folder: _fill(folder),
        lift=lambda _, folder: (folder / "filler").unlink(),
    ),
    Fault.NO_MEMORY: Injection(
        apply=lambda pid, _: _take_memory(pid), lift=lambda pid, _: _give_memory(pid)
    ),
    Fault.CLOCK_JUMP: Injection(apply=lambda *_: None, word=b"clock"),
}


@contextlib.contextmanager
def private_disk(folder: Path) -> Iterator[None]:
    """Have the namespaces' own network, and a small file system in ``folder``."""
    subprocess.run(["ip", "link", "set", "lo", "mtu", "1500", "up"], check=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
