"""`python -m tests.matrix --seed 1 --cells 0-9`: cells of the matrix, a line of JSON each.

As root it gives itself a network and a small disk of its own (`unshare`). Ends with 1 if a cell
found something.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.matrix.cells import Cell, make_cells

if TYPE_CHECKING:
    from tests.matrix.experiment import Experiment

NUM_CELLS = 200
_INSIDE = "TANDEM_MATRIX_INSIDE"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the cells and of their requests")
    parser.add_argument("--cells", default=f"0-{NUM_CELLS - 1}", help="a number, or the first-last")
    parser.add_argument("--list", action="store_true", help="print the cells and run none")
    return parser.parse_args(arguments)


def chosen(seed: int, numbers: str) -> list[tuple[int, Cell]]:
    """The cells that ``numbers`` means, with their numbers."""
    first, _, last = numbers.partition("-")
    cells = make_cells(seed, NUM_CELLS)
    return [(n, cells[n]) for n in range(int(first), int(last or first) + 1)]


def main(arguments: Sequence[str]) -> int:
    """Run cells; the process's exit status."""
    options = parse(arguments)
    cells = chosen(options.seed, options.cells)
    if options.list:
        for number, cell in cells:
            print(number, cell)
        return 0
    is_root = os.geteuid() == 0 and shutil.which("unshare") is not None
    if is_root and _INSIDE not in os.environ:
        inside = ["unshare", "--net", "--mount", sys.executable, "-m", "tests.matrix"]
        os.execvpe("unshare", [*inside, *arguments], {**os.environ, _INSIDE: "1"})
    with tempfile.TemporaryDirectory(prefix="tandem-matrix-") as folder:
        return _run(options.seed, cells, Path(folder), is_private=is_root)


def _run(seed: int, cells: list[tuple[int, Cell]], folder: Path, *, is_private: bool) -> int:
    # Imported late: a list of cells needs none of it.
    from tests.matrix.faults import NAMESPACED, private_disk

    if is_private:
        with private_disk(folder):
            return _run_here(seed, cells, folder)
    for number, cell in cells:
        if cell.fault in NAMESPACED:
            print(f"cell {number} is not run, it needs root: {cell}", flush=True)
    return _run_here(seed, [one for one in cells if one[1].fault not in NAMESPACED], folder)


def _run_here(seed: int, cells: list[tuple[int, Cell]], folder: Path) -> int:
    num_bad = num_clusters = 0
    while cells:
        num_clusters += 1
        with _experiment(folder / str(num_clusters)) as experiment:
            is_whole = True
            while cells and is_whole:  # what one cell broke is no fault of the next one
                (number, cell), *cells = cells
                report = asyncio.run(experiment.run(number, seed, cell))
                num_bad += bool(report.problems)
                is_whole = report.is_whole
                print(report.to_json(), flush=True)
            if report.problems:
                _keep_logs(experiment.folder)
    return int(num_bad > 0)


@contextlib.contextmanager
def _experiment(folder: Path) -> Iterator[Experiment]:
    """On a cluster that starts here, and ends behind it."""
    from tests.deploy.control.cluster import ControlledCluster
    from tests.matrix.experiment import ENTRYPOINTS, NUM_PLACES, Experiment, config_in, make_keys
    from tests.matrix.moments import FOLDER
    from tests.matrix.stage import Stage

    with tempfile.TemporaryDirectory(prefix="tandem-moments-") as moments:
        folder.mkdir()
        os.environ[FOLDER] = moments
        keys_file = Path(moments) / "keys.toml"
        keys = make_keys(keys_file)
        cluster = ControlledCluster(
            config_in(folder, keys_file),
            folder,
            room=NUM_PLACES,
            entrypoints=ENTRYPOINTS,
            start_s=280.0,
        )
        with Stage(Path(moments)) as stage, cluster.running():
            yield Experiment(cluster, stage, folder, keys)


def _keep_logs(folder: Path) -> None:
    kept = tempfile.mkdtemp(prefix="tandem-matrix-logs-")
    shutil.copytree(folder, kept, dirs_exist_ok=True)
    print(f"logs are in {kept}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
