"""A progress bar on stderr for long loads."""

from collections.abc import Iterator
from contextlib import contextmanager

from engine.weights.loader import ProgressCallback


@contextmanager
def progress_bar(description: str) -> Iterator[ProgressCallback]:
    """Show a bar of bytes until the context is left; yields the callback that moves it.

    On something else than a terminal nothing is drawn.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)

        def move(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield move
