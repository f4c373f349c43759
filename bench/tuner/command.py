"""The arguments of ``tandem bench tune``, and its run."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.errors import ClusterError

if TYPE_CHECKING:
    from bench.tuner.products import RowCounts
    from engine.formats.triton_gemm.tables import TunedEntry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument(
        "--model", default="deepseek-v3", help="a shape's name, or a folder with config.json"
    )
    parser.add_argument("--tp", type=int, default=1, help="ranks that share heads and widths")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--rows", type=_numbers, help="of plain GEMMs, with commas between")
    parser.add_argument("--expert-rows", type=_numbers, help="rows of each expert in prefill")
    parser.add_argument("--decode-rows", type=_numbers, help="rows of each expert in decode")
    parser.add_argument("--budget-s", type=float, default=1800.0, help="seconds for all of it")
    parser.add_argument(
        "--out", type=Path, help="folder for the found tiles (default: the package's own)"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="tiles compiled at once"
    )


def run(arguments: argparse.Namespace) -> int:
    """Tune; progress and a table on stderr, the path of the file on stdout.

    Raises:
        ClusterError: no GPU, no Triton, or a folder that cannot be written to.
        ConfigError: no such model, or sizes that cannot be divided.
    """
    # Imported late: every `tandem` command reads this file, few need torch.
    from rich.console import Console

    from bench.shapes import read_shape
    from bench.tuner.display import TuneDisplay, summary
    from bench.tuner.products import model_products
    from engine.boot.jit_cache import use_jit_cache
    from engine.formats.triton_gemm.tables import PACKAGE_FOLDER, file_name, write_table

    config = read_shape(arguments.model)
    shapes = model_products(config, tp=arguments.tp, ep=arguments.ep, rows=_row_counts(arguments))
    _require_gpu()
    use_jit_cache()
    import torch

    from bench.tuner.tuner import Tuner

    folder: Path = arguments.out or PACKAGE_FOLDER
    _require_writable(folder)
    tuner = Tuner(torch.device("cuda", torch.cuda.current_device()), max(1, arguments.jobs))
    table = tuner.table(folder)
    file = folder / file_name(table.device)
    entries: list[TunedEntry] = []
    console = Console(stderr=True)
    with TuneDisplay(console, len(shapes)) as display:
        for shape, entry in tuner.tune(shapes, arguments.budget_s):
            display.show(shape, entry)
            if entry is not None:
                # After each, so that an interrupted run keeps what it found.
                entries.append(entry)
                write_table(file, table.with_entries(entries))
    console.print(summary(entries))
    print(file)
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: numbers of at least 1, with commas between")
    return numbers


def _row_counts(arguments: argparse.Namespace) -> RowCounts:
    from bench.tuner.products import RowCounts

    given = {
        "plain": arguments.rows,
        "aligned": arguments.expert_rows,
        "masked": arguments.decode_rows,
    }
    return dataclasses.replace(
        RowCounts(), **{name: counts for name, counts in given.items() if counts is not None}
    )


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ClusterError(
            f"cannot write to {folder} ({error.strerror}); name another folder with --out"
        ) from error


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ClusterError("no CUDA device: tiles are tuned on the GPU that will run them")
    if importlib.util.find_spec("triton") is None:
        raise ClusterError("triton is not installed; PyTorch for CUDA brings it along")
