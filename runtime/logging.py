"""Log lines: one line a record, ``key=value`` after the message, and who speaks in front.

2026-11-21T10:02:03.456 INFO decode-0/1 decode.loop: preempted request_id=cmpl-1 blocks=7

A line that is logged where a request is served ends in the request's ``trace``.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

from runtime.trace.context import trace_id


class _LineFormatter(logging.Formatter):
    def __init__(self, speaker: str) -> None:
        super().__init__()
        self._speaker = speaker

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        head = f"{stamp}.{int(record.msecs):03d} {record.levelname} {self._speaker} {record.name}"
        line = f"{head}: {record.getMessage()}".replace("\n", "\\n")
        if trace := trace_id():
            line += f" trace={trace}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure_logging(
    role: str, instance: str = "", rank: int | None = None, *, stream: TextIO | None = None
) -> None:
    """Send all loggers' INFO and above to ``stream`` (standard error), once a process."""
    speaker = instance or role
    if rank is not None:
        speaker += f"/{rank}"
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_LineFormatter(speaker))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass ``__name__``."""
    return logging.getLogger(name)


def fields(**values: object) -> str:
    """``key=value`` pairs for the end of a message; strings with spaces are quoted."""
    parts = []
    for key, value in values.items():
        text = str(value)
        parts.append(f"{key}={text!r}" if " " in text else f"{key}={text}")
    return " ".join(parts)
