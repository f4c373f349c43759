"""How far a download is, for people: a bar on a terminal, else a line now and then.

All of it goes to standard error.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LOOK_S = 0.5
LINE_S = 10.0


@contextlib.contextmanager
def shown(what: str, total: int, measure: Callable[[], int]) -> Iterator[None]:
    """Show, while the body runs, how many of ``total`` bytes ``measure`` finds done."""
    console = Console(stderr=True)
    stopped = threading.Event()
    watch = _watch_bar if console.is_terminal else _watch_lines
    thread = threading.Thread(target=watch, args=(what, total, measure, stopped), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _watch_bar(what: str, total: int, measure: Callable[[], int], stopped: threading.Event) -> None:
    columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, console=Console(stderr=True)
    ) as progress:
        began = measure()
        task = progress.add_task(what, total=total, completed=began)
        while not stopped.wait(LOOK_S):
            progress.update(task, completed=measure())
        progress.update(task, completed=measure())


def _watch_lines(
    what: str, total: int, measure: Callable[[], int], stopped: threading.Event
) -> None:
    began, before = time.monotonic(), measure()
    print(f"{what}: {_size(total)}, {_size(before)} of it are here", file=sys.stderr)
    while not stopped.wait(LINE_S):
        line = describe_progress(total, before, measure(), time.monotonic() - began)
        print(f"{what}: {line}", file=sys.stderr, flush=True)


def describe_progress(total: int, before: int, done: int, seconds: float) -> str:
    """Bytes, rate and time left, ``seconds`` after ``before`` bytes were there."""
    part = 100 * done / total if total else 100.0
    text = f"{_size(done)} of {_size(total)} ({part:.0f} %)"
    rate = (done - before) / seconds if seconds > 0 else 0.0
    if rate <= 0:
        return f"{text}, nothing comes"
    return f"{text}, {_size(int(rate))}/s, {_duration((total - done) / rate)} left"


def _size(number: int) -> str:
    size, units = float(number), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}" if units[0] != "B" else f"{number} B"


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
