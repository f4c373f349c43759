"""Rows: measurements that follow one another, in as few launches as their ranks allow.

One lease of a machine should give a whole table: processes, compiled kernels and, where rows agree
on it, the model itself serve the next row too. Each row's report is written as it comes, so what
was measured is kept when a later row fails.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from bench.engine.decode import run_decode
from bench.engine.launcher import Job, RankPlace, launch
from bench.engine.options import DecodeOptions, PrefillOptions, Setup
from bench.engine.prefill import run_prefill
from bench.engine.rank_model import RankModels, Section
from bench.engine.report import Report, append_line, say
from bench.engine.shapes import choose_model
from bench.engine.summary import show_row
from engine.model.spec import check_dims
from engine.parallel.dims import ParallelDims
from runtime.errors import ConfigError
from worker.engine_options import parallel_dims

ParseRow = Callable[[str, Sequence[str]], PrefillOptions | DecodeOptions]
"""Makes options of a row's name and of all its words: the benchmark, then its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
        text: as somebody wrote it; empty for a measurement that is no row of a file.
        options: what it says.
    """

    text: str = ""
    options: PrefillOptions | DecodeOptions

    @property
    def setup(self) -> Setup:
        """Of either kind."""
        return self.options.setup

    @property
    def section(self) -> Section:
        """Of either kind."""
        return self.options.section

    @property
    def dims(self) -> ParallelDims:
        """As seen from rank 0; rows of one launch have the same."""
        return parallel_dims(self.section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What the ranks of one launch do.

    Attributes:
        rows: in order, all with the same ranks.
        is_file: each report is a line, written at once by rank 0 to `lines_to`.
        lines_to: None for stdout.
    """

    rows: Sequence[Row]
    is_file: bool = False
    lines_to: Path | None = None


def check(row: Row) -> None:
    """Refuse what cannot be run before any process starts.

    Raises:
        ConfigError: a shape, or ranks that do not divide it.
    """
    check_dims(row.dims, choose_model(row.setup).config)


def read_rows(path: Path, added: Sequence[str], parse: ParseRow) -> list[Row]:
    """Read a file of rows: one a line, as on the command line; ``#`` begins a comment.

    Args:
        path: of the file.
        added: arguments for each row; the last word on an option counts.
        parse: makes options of a row.

    Raises:
        ConfigError: no such file, no rows in it, or a row that cannot be run.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        problem = error.strerror or str(error)
        raise ConfigError("rows", str(path), problem, "a file of rows") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        words = shlex.split(line, comments=True)
        if words:
            words += added
            options = parse(f"{path}:{number}", words)
            rows.append(Row(text=shlex.join(words), options=options))
            check(rows[-1])
    if not rows:
        raise ConfigError("rows", str(path), "holds no rows", "for example decode --batch 57")
    return rows


def launch_rows(rows: Sequence[Row], lines_to: Path | None) -> int:
    """Run the rows of a file, neighbours with the same ranks in one launch; how many were run.

    Raises:
        ConfigError: fewer devices than ranks.
        ClusterError: a rank failed; the rows before are written.
    """
    num_rows = 0
    for _, members in groupby(rows, key=lambda row: (row.dims, row.setup.device)):
        group = list(members)
        _launch(Rows(rows=group, is_file=True, lines_to=lines_to))
        num_rows += len(group)
    return num_rows


def launch_one(row: Row) -> Report | None:
    """Run one measurement; its report, None on other ranks of torchrun."""
    reports = _launch(Rows(rows=[row]))
    return None if reports is None else reports[0]


def run_rows(rows: Rows, place: RankPlace) -> list[Report] | None:
    """What one rank does; the reports on rank 0."""
    models = RankModels(place)
    reports = list(_run_each(rows, models))
    models.close()
    return None if place.rank else reports


def _run_each(rows: Rows, models: RankModels) -> Iterator[Report]:
    for row in rows.rows:
        if rows.is_file:
            say(f"row: {row.text}", rank=models.place.rank)
        if isinstance(row.options, PrefillOptions):
            report = run_prefill(row.options, models)
        else:
            report = run_decode(row.options, models)
        if report is None:
            continue
        if rows.is_file:
            report = {"row": row.text, **report}
            append_line(report, rows.lines_to)
            show_row(report)
        yield report


def _launch(rows: Rows) -> list[Report] | None:
    setup = rows.rows[0].setup
    return launch(Job(run=run_rows, options=rows, world_size=setup.world_size, device=setup.device))
