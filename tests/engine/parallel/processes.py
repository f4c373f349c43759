"""Start the ranks of a test as processes, wait for all, and say what the failed one said."""

import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch

from tests.processes.forked import Process, start

_PORTS = range(20011, 32768)


def free_ports(count: int) -> int:
    """Return the first of `count` neighbouring ports that nobody else gets here for a long while.

    They are below those that systems give away. All processes of the machine take turns by a file,
    so that two that search at the same time never find the same.
    """
    with (Path(tempfile.gettempdir()) / f"tandem-test-ports-{os.getuid()}").open("a+") as last:
        fcntl.flock(last, fcntl.LOCK_EX)
        last.seek(0)
        first = int(last.read() or _PORTS.start)
        for _ in range(len(_PORTS) // count):
            first = first if first + count <= _PORTS.stop else _PORTS.start
            ports = range(first, first + count)
            if _are_free(ports):
                last.truncate(0)
                last.write(str(ports.stop))
                return first
            first = ports.stop
    raise AssertionError(f"no {count} neighbouring ports of {_PORTS} are free")


def _are_free(ports: range) -> bool:
    with ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def run_rank_processes(
    module: str,
    num_ranks: int,
    arguments: Callable[[int], Sequence[object]],
    folder: Path,
    *,
    timeout_s: float,
) -> None:
    """Run `python -m module` once per rank; AssertionError with the output of one that failed.

    Args:
        module: with a `main`.
        num_ranks: processes.
        arguments: of a rank.
        folder: for their output, one file a rank.
        timeout_s: for all of them together; then they are killed.
    """
    logs = [folder / f"rank-{rank}.log" for rank in range(num_ranks)]
    processes: list[Process] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as output:
                processes.append(_start_rank(module, arguments(rank), output, None))
        _wait_for_all(processes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    # A rank that was killed because another failed says nothing: show the first that exited.
    failed = sorted(
        (process.returncode < 0, rank)
        for rank, process in enumerate(processes)
        if process.returncode != 0
    )
    assert not failed, "\n".join(
        f"rank {rank} ended with {processes[rank].returncode}:\n{logs[rank].read_text()[-3000:]}"
        for _, rank in failed[:2]
    )


def words_of_ranks(
    module: str,
    num_ranks: int,
    arguments: Callable[[int], Sequence[object]],
    folder: Path,
    *,
    timeout_s: float,
) -> list[str]:
    """Run `python -m module` once per rank, however each ends; what each writes to stdout."""
    processes: list[Process] = []
    files = [folder / f"rank-{rank}.out" for rank in range(num_ranks)]
    try:
        with (folder / "errors.log").open("wb") as errors:
            for rank, file in enumerate(files):
                with file.open("wb") as output:
                    processes.append(_start_rank(module, arguments(rank), output, errors))
        deadline = time.monotonic() + timeout_s
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [file.read_text().strip() for file in files]


def _start_rank(
    module: str, arguments: Sequence[object], output: BinaryIO, errors: BinaryIO | None
) -> Process:
    return start(
        [module, *map(str, arguments)],
        environment={**os.environ, "OMP_NUM_THREADS": "1"},
        output=output,
        errors=errors,
        fresh=torch.cuda.is_available(),
    )


def _wait_for_all(processes: Sequence[Process], deadline: float) -> None:
    """Wait until all have ended well, one has not, or the time is over."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return
        time.sleep(0.1)
