"""Reads the logs of a cluster's processes, wherever they are: the end first, then what is added.

A ``LogSource`` is one place where logs are; ``LocalLogs`` is the run directory of this machine.
Positions are bytes; a log that was begun anew is read from its start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from deploy.errors import ClusterError

CONTROLLER = "controller"
MAX_CHUNK_BYTES = 1 << 20
_MAX_TAIL_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChunk:
    """Whole lines of a log, and the position behind them."""

    lines: tuple[str, ...]
    position: int


class LogSource(Protocol):
    """Where logs can be read; blocking."""

    def names(self) -> Sequence[str]:
        """The processes that have a log here, as ``tandem status`` calls them."""
        ...

    def tail(self, name: str, num_lines: int) -> LogChunk:
        """The last lines of a process's log.

        Raises:
            ClusterError: it cannot be read.
        """
        ...

    def read(self, name: str, position: int) -> LogChunk:
        """The lines from ``position`` on that are complete, perhaps not all of them at once.

        Raises:
            ClusterError: it cannot be read.
        """
        ...

    def close(self) -> None:
        """Let go of what reading took."""
        ...


class LocalLogs:
    """Log files of this machine."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """``files`` by the names of their processes."""
        self._files = dict(files)

    def names(self) -> Sequence[str]:
        """The processes that have a log here."""
        return [name for name, path in self._files.items() if path.exists()]

    def tail(self, name: str, num_lines: int) -> LogChunk:
        """The last lines of a process's log."""
        with _open(self._files[name]) as log:
            end = log.seek(0, 2)
            data, start = b"", end
            while start > 0 and data.count(b"\n") <= num_lines and end - start < _MAX_TAIL_BYTES:
                start = max(0, start - MAX_CHUNK_BYTES // 16)
                log.seek(start)
                data = log.read(end - start)
        lines, num_whole = whole_lines(data)
        return LogChunk(lines=lines[-num_lines:] if num_lines else (), position=start + num_whole)

    def read(self, name: str, position: int) -> LogChunk:
        """The complete lines from ``position`` on."""
        try:
            with _open(self._files[name]) as log:
                if log.seek(0, 2) < position:
                    position = 0  # a new run has begun it anew
                log.seek(position)
                data = log.read(MAX_CHUNK_BYTES)
        except ClusterError:
            return LogChunk(lines=(), position=0)  # gone, until a new run begins it
        lines, num_whole = whole_lines(data)
        return LogChunk(lines=lines, position=position + num_whole)

    def close(self) -> None:
        """Nothing is held."""


class SeveralLogs:
    """Logs of several places as if they were in one; a name is of the first place that has it."""

    def __init__(self, *sources: LogSource) -> None:
        self._sources = sources

    def names(self) -> Sequence[str]:
        """Those of all places."""
        return list(dict.fromkeys(name for source in self._sources for name in source.names()))

    def tail(self, name: str, num_lines: int) -> LogChunk:
        """The last lines of a process's log."""
        return self._source_of(name).tail(name, num_lines)

    def read(self, name: str, position: int) -> LogChunk:
        """The complete lines from ``position`` on."""
        return self._source_of(name).read(name, position)

    def close(self) -> None:
        """Let go of all places."""
        for source in self._sources:
            source.close()

    def _source_of(self, name: str) -> LogSource:
        last = self._sources[-1]
        return next((source for source in self._sources if name in source.names()), last)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ClusterError(f"cannot read {path}: {error.strerror}") from error


def whole_lines(data: bytes) -> tuple[tuple[str, ...], int]:
    """The complete lines of ``data``, and their bytes; a line as long as a chunk counts as one."""
    num_bytes = data.rfind(b"\n") + 1
    if not num_bytes and len(data) >= MAX_CHUNK_BYTES:
        return (data.decode(errors="replace"),), len(data)
    return tuple(data[:num_bytes].decode(errors="replace").split("\n")[:-1]), num_bytes


def merged_tail(
    source: LogSource, names: Sequence[str], num_lines: int
) -> tuple[list[str], dict[str, int]]:
    """The last lines of several logs in the order of their times, and the positions behind them."""
    stamped: list[tuple[str, int, str]] = []
    positions = {}
    for name in names:
        chunk = source.tail(name, num_lines)
        positions[name] = chunk.position
        stamp = ""
        for line in chunk.lines:
            # A traceback has no time of its own: it stays with the line before it.
            stamp = line[:_STAMP_CHARS] if _is_stamped(line) else stamp
            stamped.append((stamp, len(stamped), line))
    return [line for _, _, line in sorted(stamped)][-num_lines:] if num_lines else [], positions


_STAMP_CHARS = len("2026-11-21T10:02:03.456")


def _is_stamped(line: str) -> bool:
    return (
        line[:4].isdigit() and line[10:11] == "T" and line[_STAMP_CHARS : _STAMP_CHARS + 1] == " "
    )


def follow(
    source: LogSource,
    positions: dict[str, int],
    *,
    poll_s: float,
    goes_on: Callable[[], bool] = lambda: True,
) -> Iterator[str]:
    """Lines as they are added to any of the logs, until ``goes_on`` says no."""
    while True:
        is_last = not goes_on()
        is_any = False
        for name, position in positions.items():
            chunk = source.read(name, position)
            positions[name] = chunk.position
            is_any |= bool(chunk.lines)
            yield from chunk.lines
        if is_last and not is_any:
            return
        if not is_any:
            time.sleep(poll_s)


def chosen_names(wanted: str, names: Sequence[str]) -> list[str]:
    """The logs that ``wanted`` means: a process, an instance, a role; empty: all.

    Raises:
        ClusterError: there is none of that name.
    """
    if not wanted:
        return list(names)
    if wanted in names:
        return [wanted]
    found = [name for name in names if name.startswith((f"{wanted}/", f"{wanted}-"))]
    if not found:
        raise ClusterError(f"there is no log of {wanted!r}. Fix: one of {', '.join(names)}")
    return found
