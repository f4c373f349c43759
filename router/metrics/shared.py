"""The sums of metrics over the HTTP processes of one port, which share a folder of files.

Called by whoever answers `/metrics` or `/status`; reads files, blocks for as long as that takes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.multiprocess import MultiProcessCollector


class SharedMetrics:
    """A collector of all processes' files, also while one of them is being made.

    prometheus_client opens a file and gives it its size in two steps, and its own collector ends
    with struct.error if it reads in between. Such a file has no value yet.
    """

    def __init__(self, folder: str) -> None:
        """Read the files of ``folder`` at every `collect`."""
        self._folder = Path(folder)

    def collect(self) -> Iterable[Metric]:
        """Sums over all processes; ``live`` gauges of those that live."""
        files = [str(path) for path in self._folder.glob("*.db") if _size(path)]
        merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
        return merged


def _size(path: Path) -> int:
    """Bytes; 0 of a file that is gone: those of ended processes are removed."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
