"""What a process does to itself: die with its parent, keep to its share of the cores.

Run as a script, ``process.py PARENT_PID COMMAND...``, it becomes COMMAND, which dies with its
parent. Doing so between fork and exec is not safe where the parent has threads: the child would
run Python with whatever locks they held.
"""

from __future__ import annotations

import ctypes
import errno
import os
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
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(num_threads)


def _become(parent_pid: int, command: list[str]) -> None:
    die_with_parent(parent_pid)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"error: cannot run {command[0]!r}: {error.strerror}")


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
