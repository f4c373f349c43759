"""Ranks and routers of tests as processes that are forked from one that has imported the like.

Importing torch and a role costs two seconds of a core, and the tests start some hundred ranks.
`start` gives a process like ``subprocess.Popen([sys.executable, "-m", ...])`` in a session of its
own: with its own pid, environment, signals and exit status. It differs in that
``/proc/PID/environ`` and ``cmdline`` are the server's, and that modules are imported in another
order: what a role imports when is for tests that start it as a person does. Libraries of GPUs want
a process that nobody has been before: one that is ``fresh`` is started, not forked.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from tests.processes.fork_server import NUMBER

IMPORTED = ("prefill.worker", "decode.worker", "router.service")
START_TIMEOUT_S = 300.0
"""For the server's imports, on a machine that is busy with something else."""


class ForkedProcess:
    """One process; what `subprocess.Popen` calls the same is the same. Any thread may call."""

    def __init__(self, args: Sequence[str], reports: socket.socket) -> None:
        """Wait until it runs; ``reports`` tells its pid, and in the end its status."""
        self.args = list(args)
        self.returncode: int | None = None
        self._reports = reports
        self._waiting = threading.Lock()
        self.pid = self._next_number(START_TIMEOUT_S)

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative for a signal; TimeoutExpired after ``timeout`` seconds."""
        if not self._waiting.acquire(timeout=-1 if timeout is None else timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        try:
            if self.returncode is None:
                self.returncode = self._next_number(timeout)
                self._reports.close()
            return self.returncode
        except (TimeoutError, BlockingIOError):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
        finally:
            self._waiting.release()

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its server reaped it just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _next_number(self, timeout: float | None) -> int:
        self._reports.settimeout(timeout)
        message = self._reports.recv(NUMBER.size)
        assert message, "the server that forks has ended"
        (number,) = NUMBER.unpack(message)
        return int(number)


Process = subprocess.Popen[bytes] | ForkedProcess


class ForkServer:
    """The process that has imported ``modules``."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Start it; it imports while the caller goes on."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.processes.fork_server", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, *modules],
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # torch reads it as it is imported
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: BinaryIO,
        errors: BinaryIO | None = None,
    ) -> ForkedProcess:
        """Fork a process that runs ``command``, a module and its arguments, in this folder."""
        module, *arguments = command
        order = {
            "module": module,
            "arguments": arguments,
            "folder": os.getcwd(),
            "environment": dict(environment),
        }
        reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            files = [output.fileno(), (errors or output).fileno(), theirs.fileno()]
            socket.send_fds(self._control, [json.dumps(order).encode()], files)
        return ForkedProcess(command, reports)

    def close(self) -> None:
        """End the server; processes that it has forked go on."""
        self._control.close()
        self._process.wait()


@functools.cache
def _server() -> ForkServer:
    server = ForkServer(IMPORTED)
    atexit.register(server.close)
    return server


def start(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: BinaryIO,
    errors: BinaryIO | None = None,
    fresh: bool = False,
) -> Process:
    """Run a module in a process of its own; see `ForkServer.start`."""
    if fresh:
        python = [sys.executable, "-m", *command]
        return execute(python, environment=environment, output=output, errors=errors)
    return _server().start(command, environment=environment, output=output, errors=errors)


def execute(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: BinaryIO,
    errors: BinaryIO | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own."""
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdout=output,
        stderr=errors or subprocess.STDOUT,
        start_new_session=True,
    )
