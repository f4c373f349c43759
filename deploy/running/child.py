"""One child process: its log file, the lines it says, and its end.

The child writes straight into its log file and this reads the file's tail, so there is no pipe
that could fill up, no thread, and the log outlives both. Not thread-safe; start it from a thread
that lives as long as the child should (the kernel kills the child when that thread ends).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import deploy
from deploy.plan import OWN_PYTHON, ProcessSpec
from runtime.process import dying_with_us

_MAX_READ_BYTES = 256 * 1024
_TAIL_LINES = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildReport:
    """What happened to a child since the last report."""

    pid: int
    exit_status: int | None
    """None while it runs; -N after signal N."""
    lines: tuple[str, ...]
    """Whole log lines, oldest first; a burst beyond 256 KiB is cut to its end. None of a child that
    writes where its parent does."""
    last_lines: tuple[str, ...] = ()
    """Once it has ended: the end of its log, also of what was reported before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPiece:
    """Part of a log file."""

    offset: int
    """Of ``data`` in the file; what follows begins at ``end``."""
    data: bytes

    @property
    def end(self) -> int:
        """Where to read on."""
        return self.offset + len(self.data)


class Child:
    """A process started from ``spec``; it dies with the thread that created this."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self._log_path = Path(spec.log_path) if spec.log_path else None
        self._offset = 0
        if self._log_path is None:
            self._process = _start(spec, None)
            return
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._offset = log.tell()
            self._process = _start(spec, log)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def poll(self) -> ChildReport:
        """The news since the last call; never blocks."""
        exit_status = self._process.poll()
        lines = self._read_lines(final=exit_status is not None)
        last_lines: tuple[str, ...] = ()
        if exit_status is not None and self._log_path is not None:
            last_lines = tuple(tail(self._log_path, _TAIL_LINES))
        return ChildReport(
            pid=self.pid, exit_status=exit_status, lines=lines, last_lines=last_lines
        )

    def terminate(self) -> None:
        """Ask the child to drain and end (SIGTERM)."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """End the child and all that it started in its session, at once, and reap it."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def _read_lines(self, *, final: bool) -> tuple[str, ...]:
        if self._log_path is None or not self._log_path.exists():  # somebody cleared logs away
            return ()
        with self._log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            start = max(self._offset, end - _MAX_READ_BYTES)
            log.seek(start)
            data = log.read(end - start)
        complete = len(data) if final else data.rfind(b"\n") + 1
        self._offset = start + complete
        return tuple(data[:complete].decode(errors="replace").splitlines())


def _start(spec: ProcessSpec, log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        dying_with_us(_own_command(spec.command)),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        cwd=spec.cwd or Path(deploy.__file__).resolve().parents[1],
        env={**spec.default_env, **os.environ, **spec.env},
        # Its own session: a terminal's Ctrl-C reaches the controller only.
        start_new_session=True,
    )


def _own_command(command: tuple[str, ...]) -> tuple[str, ...]:
    return (sys.executable, *command[1:]) if command[0] == OWN_PYTHON else command


def read_log(path: Path, offset: int, limit: int = _MAX_READ_BYTES) -> LogPiece:
    """At most ``limit`` bytes from ``offset`` on; a negative one counts from the end.

    Nothing, at the file's end, where the file is shorter than that; nothing where there is none.
    """
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            start = min(size, offset) if offset >= 0 else max(0, size + offset)
            log.seek(start)
            return LogPiece(offset=start, data=log.read(limit))
    except FileNotFoundError:
        return LogPiece(offset=0, data=b"")


def tail(path: Path, num_lines: int) -> list[str]:
    """The last lines of a log file; empty when there is none."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _MAX_READ_BYTES))
            return log.read().decode(errors="replace").splitlines()[-num_lines:]
    except FileNotFoundError:
        return []
