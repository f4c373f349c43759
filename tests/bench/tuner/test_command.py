"""`tandem bench tune`: its arguments, what it refuses, and what it shows."""

import argparse
import io
from pathlib import Path

import pytest
from rich.console import Console

from bench.tuner.command import _require_writable, _row_counts
from bench.tuner.display import TuneDisplay, summary
from bench.tuner.products import RowCounts
from deploy.cli import build_parser, main
from deploy.errors import ClusterError
from engine.formats.triton_gemm.tables import TunedEntry
from engine.formats.triton_gemm.tiles import ProductShape, RowLayout, TileConfig

pytestmark = pytest.mark.nightly

SHAPE = ProductShape(
    layout=RowLayout.ALIGNED, num_rows=4096, num_columns=7168, depth=2048, num_experts=32
)
ENTRY = TunedEntry(
    shape=SHAPE,
    tile=TileConfig(block_m=128, block_n=64, block_k=128, num_warps=4, num_stages=3, group_m=8),
    microseconds=123.456,
    tflops=640.25,
    deep_gemm_tflops=None,
    tried=(12, 90),
)


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", "tune", *arguments])


def test_rows_that_are_given_replace_the_usual_ones() -> None:
    assert _row_counts(parse()) == RowCounts()
    given = _row_counts(parse("--rows", "1,2", "--decode-rows", "7"))
    assert (given.plain, given.aligned, given.masked) == ((1, 2), RowCounts().aligned, (7,))


@pytest.mark.parametrize("rows", ["0", "1,-3", "x", ""])
def test_rows_that_are_no_numbers_are_refused(
    rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("--rows", rows)
    assert "--rows" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "tune", "--out", str(tmp_path)]) == 1
    assert "error: no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_divided_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tune", "--tp", "3"]) == 2
    assert "--tp = 3" in capsys.readouterr().err


def test_each_product_is_a_line_where_there_is_no_terminal() -> None:
    screen = io.StringIO()
    with TuneDisplay(Console(file=screen, width=60), 2) as display:
        display.show(SHAPE, ENTRY)
        display.show(SHAPE, None)
    assert screen.getvalue().splitlines() == [
        "1/2 aligned x32 4096x7168x2048: 640.25 TFLOP/s",
        "2/2 aligned x32 4096x7168x2048: no tile runs",
    ]


def test_a_terminal_gets_a_bar() -> None:
    screen = io.StringIO()
    with TuneDisplay(Console(file=screen, width=100, force_terminal=True), 1) as display:
        display.show(SHAPE, ENTRY)
    assert "1/1" in screen.getvalue()


def test_the_table_names_tiles_and_the_rival() -> None:
    screen = io.StringIO()
    Console(file=screen, width=120).print(summary([ENTRY]))
    row = screen.getvalue().splitlines()[-2]
    for part in ("aligned x32 4096x7168x2048", "128x64x128 w4 s3 g8", "123.5", "640.2", "12/90"):
        assert part in row


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_runs(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ClusterError, match="--out"):
        _require_writable(file / "folder")
    _require_writable(tmp_path / "new" / "folder")
    assert not list((tmp_path / "new" / "folder").iterdir())
