"""The choice of a tile: the nearest measurement of this device, else the best guess."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.formats.triton_gemm.candidates import candidates, is_legal
from engine.formats.triton_gemm.limits import ADA, AMPERE, HOPPER
from engine.formats.triton_gemm.tables import (
    PACKAGE_FOLDER,
    VARIABLE,
    TunedEntry,
    TunedTable,
    choose,
    file_name,
    find_table,
    read_table,
    table_to_extend,
    write_table,
)
from engine.formats.triton_gemm.tiles import ProductShape, RowLayout, TileConfig
from runtime.errors import ConfigError

SHAPE = ProductShape(layout=RowLayout.PLAIN, num_rows=64, num_columns=4096, depth=7168)


def tile(block_n: int) -> TileConfig:
    return TileConfig(
        block_m=32, block_n=block_n, block_k=128, num_warps=4, num_stages=3, group_m=1
    )


def entry(num_rows: int, block_n: int, **changes: object) -> TunedEntry:
    shape = dataclasses.replace(SHAPE, num_rows=num_rows, **changes)  # type: ignore[arg-type]
    return TunedEntry(
        shape=shape, tile=tile(block_n), microseconds=12.5, tflops=300.25, tried=(7, 40)
    )


TABLE = TunedTable(
    device="NVIDIA H200",
    sm=90,
    shared_memory=232448,
    triton="3.6.0",
    entries=(entry(16, 32), entry(256, 64), entry(4096, 128), entry(64, 256, depth=2048)),
)


@pytest.mark.parametrize(
    ("num_rows", "block_n"),
    [(0, 32), (1, 32), (16, 32), (63, 32), (65, 64), (300, 64), (1100, 128), (1 << 20, 128)],
)
def test_the_nearest_number_of_rows_is_taken(num_rows: int, block_n: int) -> None:
    shape = dataclasses.replace(SHAPE, num_rows=num_rows)
    assert choose(shape, TABLE, HOPPER) == tile(block_n)


@given(st.integers(0, 1 << 20), st.sampled_from([AMPERE, ADA, HOPPER]))
def test_any_number_of_rows_gets_a_legal_tile(num_rows: int, limits: object) -> None:
    shape = dataclasses.replace(SHAPE, num_rows=num_rows)
    assert isinstance(limits, type(HOPPER))
    assert is_legal(choose(shape, TABLE, limits), limits)


@pytest.mark.parametrize(
    "shape",
    [
        dataclasses.replace(SHAPE, num_columns=4224),
        dataclasses.replace(SHAPE, depth=1024),
        dataclasses.replace(SHAPE, layout=RowLayout.ALIGNED, num_experts=8),
    ],
)
def test_what_was_not_measured_gets_the_best_guess(shape: ProductShape) -> None:
    assert choose(shape, TABLE, HOPPER) == candidates(shape, HOPPER)[0]
    assert choose(shape, None, HOPPER) == candidates(shape, HOPPER)[0]


def test_measurements_of_another_kind_of_gpu_are_not_used() -> None:
    assert choose(SHAPE, TABLE, AMPERE) == candidates(SHAPE, AMPERE)[0]


def test_a_tile_that_does_not_fit_is_not_used() -> None:
    large = TileConfig(block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=5, group_m=1)
    table = TABLE.with_entries([dataclasses.replace(entry(64, 32), tile=large)])
    small = dataclasses.replace(HOPPER, shared_memory=99 * 1024)
    assert choose(SHAPE, table, HOPPER) == large
    assert choose(SHAPE, table, small) == tile(32)  # of 16 rows, the next nearest


def test_a_table_survives_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / file_name(TABLE.device)
    assert file.name == "NVIDIA_H200.json"
    write_table(file, TABLE)
    assert set(read_table(file).entries) == set(TABLE.entries)
    assert dataclasses.replace(read_table(file), entries=()) == dataclasses.replace(
        TABLE, entries=()
    )
    again = file.read_text(encoding="utf-8")
    write_table(file, dataclasses.replace(TABLE, entries=TABLE.entries[::-1]))
    assert file.read_text(encoding="utf-8") == again  # in the same order


def test_a_new_measurement_replaces_the_old_one() -> None:
    merged = TABLE.with_entries([entry(256, 32), entry(512, 64)])
    assert len(merged.entries) == len(TABLE.entries) + 1
    assert choose(dataclasses.replace(SHAPE, num_rows=256), merged, HOPPER) == tile(32)


def test_a_table_of_another_compiler_is_ignored_and_said_to_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_table(tmp_path / "NVIDIA_H200.json", TABLE)
    assert find_table("NVIDIA H200", "3.8.1", [tmp_path]) is not None
    with caplog.at_level(logging.WARNING):
        assert find_table("NVIDIA H200", "4.0.0", [tmp_path]) is None
    assert "triton=3.6.0 running=4.0.0" in caplog.text


@pytest.mark.parametrize("running", ["3.6.0", "3.6.1", "3.9.2", "4.0.0", "2.9.0"])
def test_the_tuner_adds_to_what_serving_uses_and_to_nothing_else(
    tmp_path: Path, running: str
) -> None:
    file, empty = (
        tmp_path / "NVIDIA_H200.json",
        dataclasses.replace(TABLE, triton=running, entries=()),
    )
    assert table_to_extend(file, empty) is empty
    write_table(file, TABLE)
    served = find_table("NVIDIA H200", running, [tmp_path])
    extended = table_to_extend(file, empty)
    assert extended.triton == running
    assert set(extended.entries) == set(served.entries if served is not None else ())
    assert (served is not None) == running.startswith("3.")
    write_table(file, extended)
    again = find_table("NVIDIA H200", running, [tmp_path])
    assert again is not None, "what the tuner has written is served"


def test_the_named_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_table("Some GPU", "3.6.0") is None
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    write_table(tmp_path / "Some_GPU.json", TABLE)
    assert find_table("Some GPU", "3.6.0") is not None


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"entries": [{}]}', '{"entries": [], "device": "x", "unknown": 1}'],
)
def test_a_file_that_is_no_table_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "Some_GPU.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="Some_GPU"):
        find_table("Some GPU", "3.6.0", [tmp_path])


@pytest.mark.parametrize("file", sorted(PACKAGE_FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_tables_of_the_package_are_whole(file: Path) -> None:
    table = read_table(file)
    assert file.name == file_name(table.device)
    assert table.entries
    limits = dataclasses.replace(HOPPER, sm=table.sm, shared_memory=table.shared_memory)
    assert all(is_legal(entry.tile, limits) for entry in table.entries)
    assert json.loads(file.read_text(encoding="utf-8"))["triton"]
