"""Shows tuning: a progress bar on a terminal, a line per product elsewhere, a table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine.formats.triton_gemm.tables import TunedEntry
from engine.formats.triton_gemm.tiles import ProductShape, TileConfig


class TuneDisplay:
    """A context manager; feed it with `show`."""

    def __init__(self, console: Console, num_products: int) -> None:
        self._console = console
        self._num_products, self._num_done = num_products, 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("tuning", total=num_products)

    def __enter__(self) -> TuneDisplay:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, shape: ProductShape, entry: TunedEntry | None) -> None:
        """Say that a product is done."""
        self._num_done += 1
        result = "no tile runs" if entry is None else f"{entry.tflops} TFLOP/s"
        line = f"{describe_shape(shape)}: {result}"
        self._progress.update(self._task, advance=1, description=line)
        if not self._console.is_terminal:
            self._console.print(f"{self._num_done}/{self._num_products} {line}", soft_wrap=True)


def summary(entries: Sequence[TunedEntry]) -> Table:
    """Return the table of all results."""
    table = Table("product", "tile", "us", "TFLOP/s", "DeepGEMM", "timed")
    for entry in entries:
        rival = entry.deep_gemm_tflops
        table.add_row(
            describe_shape(entry.shape),
            describe_tile(entry.tile),
            f"{entry.microseconds:.1f}",
            f"{entry.tflops:.1f}",
            "-" if rival is None else f"{rival:.1f}",
            "{}/{}".format(*entry.tried),
        )
    return table


def describe_shape(shape: ProductShape) -> str:
    """Return the shape in a few words."""
    experts = f" x{shape.num_experts}" if shape.num_experts > 1 else ""
    return f"{shape.layout}{experts} {shape.num_rows}x{shape.num_columns}x{shape.depth}"


def describe_tile(tile: TileConfig) -> str:
    """Return rows x columns x depth, warps, stages, and the height of a group."""
    blocks = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
    return f"{blocks} w{tile.num_warps} s{tile.num_stages} g{tile.group_m}"
