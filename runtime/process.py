"""What a process does to itself: die with its parent, keep to its share of the cores.

Run as a script, ``process.py PARENT_PID COMMAND...``, it becomes COMMAND, which ends with its
parent. Doing so between fork and exec is not safe where the parent has threads: the child would
run Python with whatever locks they held.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel send SIGKILL to this process when its parent ends, however that ends.

    Linux only (prctl(2)); elsewhere it does nothing. ``parent_pid`` closes the race with a parent
    that is gone already: another parent now means that it is time to go.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def dying_with_us(command: Sequence[str]) -> tuple[str, ...]:
    """``command`` such that its process ends when the thread that starts it from here does.

    Raises:
        FileNotFoundError: there is no such command.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    return (sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), *command)


def limit_threads(num_threads: int) -> None:
    """Set the thread counts that numeric libraries read when they are first imported."""
    os.environ.update(thread_limits(num_threads))


def thread_limits(num_threads: int) -> dict[str, str]:
    """What ``limit_threads`` sets, for the environment of another process."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(num_threads))


def limit_memory(num_bytes: int) -> None:
    """End this process, and leave no core, where it asks for more than so many bytes beyond what it
    has. Linux only; elsewhere it does nothing.
    """
    if sys.platform == "linux":
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = num_pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _become(parent_pid: int, command: list[str]) -> None:
    die_with_parent(parent_pid)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"error: cannot run {command[0]!r}: {error.strerror}")


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
