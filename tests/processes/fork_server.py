"""Has imported what the processes of tests import, and forks one of them for every order.

Run as ``python -m tests.processes.fork_server SOCKET MODULE...`` by `tests.processes.forked`. An
order is one message on the socket, with three files: where the process writes, and its errors, and
the socket on which its pid and, once, its exit status are told. The server ends when nobody can
order any more; the processes do not. It has one thread, and whoever it forks goes on in `main`, out
of its loop, so that the process ends as an interpreter ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import socket
import struct
import sys
from dataclasses import dataclass

NUMBER = struct.Struct("i")
MAX_ORDER = 1 << 20
"""Bytes; environments of megabytes are refused by `execve`, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to run: ``python -m MODULE ARGUMENTS`` in a folder and an environment."""

    module: str
    arguments: list[str]
    folder: str
    environment: dict[str, str]


def serve(control: socket.socket) -> tuple[Order, list[int]] | None:
    """In the server None, at its end; in a process of its own its order, stdout and stderr."""
    reports: dict[int, tuple[int, socket.socket]] = {}
    with selectors.PollSelector() as selector, contextlib.ExitStack() as inherited:
        selector.register(control, selectors.EVENT_READ)
        inherited.enter_context(control)
        while True:
            for key, _ in selector.select():
                if key.fd in reports:
                    selector.unregister(key.fd)
                    _report(key.fd, *reports.pop(key.fd))
                    continue
                message, files, *_ = socket.recv_fds(control, MAX_ORDER, 3)
                if not message:
                    return None
                report = socket.socket(fileno=files.pop())
                pid = os.fork()
                if pid == 0:
                    for ended, (_, other) in reports.items():
                        os.close(ended)
                        other.close()
                    report.close()
                    return Order(**json.loads(message)), files
                for file in files:
                    os.close(file)
                report.send(NUMBER.pack(pid))
                end = os.pidfd_open(pid)
                reports[end] = (pid, report)
                selector.register(end, selectors.EVENT_READ)


def _report(end: int, pid: int, report: socket.socket) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with report, contextlib.suppress(BrokenPipeError):  # nobody wants to know
        report.send(NUMBER.pack(status))
    os.close(end)


def main() -> None:
    """Serve; in a process that was forked, be what was ordered."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # what is shared stays shared, and nobody looks through it again
    forked = serve(control)
    if forked is None:
        return
    order, files = forked
    os.setsid()
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv = [order.module, *order.arguments]
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
