"""Progress of long work at start: a bar on a terminal, else lines of the log.

The lines say the share, how much of how much, the speed and the time that is left, a line every few
seconds: whoever shows the log of a worker shows its progress.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

from engine.weights.loader import ProgressCallback

logger = logging.getLogger(__name__)

LINE_S = 3.0
"""Between two lines."""


class Unit(Enum):
    """What a bar counts."""

    BYTES = auto()
    CALLS = auto()


@contextmanager
def progress_bar(description: str, *, unit: Unit = Unit.BYTES) -> Iterator[ProgressCallback]:
    """Show progress until the context is left; yields the callback that moves it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressLines(description, unit).move
        return
    counts = {
        Unit.BYTES: (DownloadColumn(), TransferSpeedColumn()),
        Unit.CALLS: (MofNCompleteColumn(),),
    }[unit]
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(description, total=None)

        def move(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield move


class ProgressLines:
    """Tells the log now and then."""

    def __init__(
        self, description: str, unit: Unit, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._description, self._unit, self._clock = description, unit, clock
        self._began = clock()
        self._told_at = self._began

    def move(self, done: int, total: int) -> None:
        """So much of the work is done."""
        now = self._clock()
        if now - self._told_at >= LINE_S and 0 < done < total:
            self._told_at = now
            line = progress_text(done, total, now - self._began, self._unit)
            logger.info("%s %s", self._description, line)


def progress_text(done: int, total: int, seconds: float, unit: Unit) -> str:
    """For example "12% (80.5 of 671.0 GB, 2.30 GB/s, 4 min 17 s left)"."""
    left = int(seconds * (total - done) / done)
    left_text = f"{left // 60} min {left % 60} s left" if left >= 60 else f"{left} s left"
    share = f"{100 * done // total}%"
    if unit is Unit.CALLS:
        return f"{share} ({done} of {total}, {left_text})"
    scale, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    speed = f"{done / 1e9 / seconds:.2f} GB/s" if seconds > 0 else "-"
    return f"{share} ({done / scale:.1f} of {total / scale:.1f} {name}, {speed}, {left_text})"
