"""Which cut a product gets: the measured one of as many rows or more, where it was faster."""

from pathlib import Path

import pytest

from engine.kernels.few_rows.cuts import Cut, is_legal
from engine.kernels.few_rows.tables import (
    FOLDER,
    CutEntry,
    CutTable,
    find_cuts,
    read_table,
    write_table,
)
from engine.kernels.triton_gemm.limits import HOPPER
from runtime.errors import ConfigError


def entry(num_rows: int, ours: float, theirs: float, splits: int = 1) -> CutEntry:
    return CutEntry(
        num_rows=num_rows,
        num_columns=7168,
        depth=2048,
        cut=Cut(block_n=64, num_splits=splits, num_warps=4, num_stages=4),
        microseconds=ours,
        deep_gemm_microseconds=theirs,
    )


def test_the_next_measured_number_of_rows_decides() -> None:
    entries = (entry(16, 5.0, 10.0, 2), entry(64, 6.0, 10.0, 3), entry(128, 10.0, 10.0, 4))
    table = CutTable(device="GPU", entries=entries)

    def splits(num_rows: int) -> int | None:
        cut = table.choose(num_rows, 7168, 2048)
        return cut.num_splits if cut else None

    assert [splits(n) for n in (1, 16, 17, 64)] == [2, 2, 3, 3]
    assert splits(65) is None  # not faster
    assert splits(129) is None  # not measured
    assert table.choose(16, 7168, 4096) is None
    assert table.choose(16, 7040, 2048) is None


def test_a_gain_within_the_noise_is_none() -> None:
    assert not entry(16, 10.0, 10.2).is_faster
    assert entry(16, 10.0, 10.4).is_faster


def test_tables_survive_writing(tmp_path: Path) -> None:
    entries = [entry(16, 5.0, 10.0), entry(64, 6.5, 9.0, 3)]
    write_table(tmp_path / "My_GPU.json", "My GPU", entries)
    assert find_cuts("My GPU", tmp_path) == CutTable(device="My GPU", entries=tuple(entries))
    assert find_cuts("Another GPU", tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", '{"device": "x"}', '{"device": 1, "entries": [{}]}'])
def test_what_is_no_table_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "GPU.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"GPU\.json"):
        read_table(file)


def test_the_tables_of_the_package_hold_cuts_that_run() -> None:
    for file in FOLDER.glob("*.json"):
        for found in read_table(file).entries:
            assert is_legal(found.cut, found.num_rows, found.depth, HOPPER), found
            assert found.microseconds > 0
