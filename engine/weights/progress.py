"""A progress bar on stderr for long work at start: loading, compiling."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

from engine.weights.loader import ProgressCallback


class Unit(Enum):
    """What a bar counts."""

    BYTES = auto()
    CALLS = auto()


@contextmanager
def progress_bar(description: str, *, unit: Unit = Unit.BYTES) -> Iterator[ProgressCallback]:
    """Show a bar until the context is left; yields the callback that moves it.

    On something else than a terminal nothing is drawn.
    """
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
    counts = {
        Unit.BYTES: (DownloadColumn(), TransferSpeedColumn()),
        Unit.CALLS: (MofNCompleteColumn(),),
    }[unit]
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)

        def move(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield move
