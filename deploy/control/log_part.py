"""Parts of a log file, for whoever follows it from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MOST_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """Some bytes of a log."""

    data: bytes
    next_offset: int
    """Where the next part begins."""
    size: int
    """Of the file; smaller than an offset that was read before: it began anew."""


def read_log(path: str, offset: int, *, max_bytes: int = 0, last_lines: int = 0) -> LogPart:
    """At most ``max_bytes`` (0: 256 KiB) from ``offset`` on, or the last lines of the file.

    A file that is not there (yet) is empty.
    """
    most = min(max_bytes or _MOST_BYTES, _MOST_BYTES)
    try:
        with Path(path).open("rb") as log:
            size = log.seek(0, 2)
            start = max(0, size - most) if last_lines else min(offset, size)
            log.seek(start)
            data = log.read(most)
    except FileNotFoundError:
        return LogPart(data=b"", next_offset=0, size=0)
    end = start + len(data)
    if last_lines:
        data = b"".join(data.splitlines(keepends=True)[-last_lines:])
    return LogPart(data=data, next_offset=end, size=size)
