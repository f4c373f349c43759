"""Tiles of streamed products: what fits a GPU, and which cut serves how many rows."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.formats.expert_stream.tiles import (
    MEASURED,
    StreamTile,
    StreamTiles,
    choose_tiles,
    is_legal,
    refusal,
    shared_memory,
)
from engine.formats.triton_gemm.limits import ADA, HOPPER

SMALL = StreamTile(block_m=16, num_stages=3)

tiles = st.builds(
    StreamTile,
    block_m=st.sampled_from([16, 32, 64, 128]),
    block_n=st.sampled_from([64, 128]),
    unroll=st.sampled_from([1, 2]),
    num_warps=st.sampled_from([4, 8]),
    num_stages=st.integers(2, 12),
    per_sm=st.integers(1, 4),
)


@given(tiles)
def test_legal_tiles_fit_and_hold_what_they_load(tile: StreamTile) -> None:
    operands = tile.num_stages * tile.unroll * (2 * tile.block_n + tile.block_m) * 128
    assert shared_memory(tile) > operands
    if is_legal(tile, HOPPER):
        assert tile.per_sm * operands < 228 * 1024
        assert not is_legal(tile, ADA)


@given(tiles)
def test_more_of_anything_takes_more_memory(tile: StreamTile) -> None:
    larger = dataclasses.replace(tile, num_stages=tile.num_stages + 1)
    assert shared_memory(larger) > shared_memory(tile)
    if not is_legal(tile, HOPPER):
        assert not is_legal(larger, HOPPER)
    shared = dataclasses.replace(tile, per_sm=tile.per_sm + 1)
    assert is_legal(tile, HOPPER) or not is_legal(shared, HOPPER)


@pytest.mark.parametrize(("rows", "index"), [(1, 0), (16, 0), (17, 1), (64, 1), (65, None)])
def test_the_least_number_of_rows_that_is_not_less_is_chosen(rows: int, index: int | None) -> None:
    table = (
        StreamTiles(rows=16, gated=SMALL, down=SMALL),
        StreamTiles(rows=64, gated=SMALL, down=SMALL),
    )
    assert choose_tiles(table, rows) is (None if index is None else table[index])


@given(
    tiles,
    st.booleans(),
    st.sampled_from([64, 128, 256, 384]),
    st.integers(1, 64),
    st.integers(1, 64),
)
def test_a_product_that_is_not_refused_is_cut_into_whole_steps(
    tile: StreamTile, is_gated: bool, max_rows: int, width: int, depth: int
) -> None:
    reason = refusal(tile, max_rows, width * 64, depth * 128, is_gated=is_gated)
    fits = [
        max_rows % tile.block_m == 0,
        width * 64 % (2 * tile.block_n) == 0,
        depth % tile.unroll == 0,
        tile.block_n == 128 or not is_gated,
    ]
    assert (not reason) == all(fits), reason


def test_experts_of_an_odd_number_of_groups_are_refused_by_steps_of_two() -> None:
    """1408 is 11 groups of 128: the weight's rows are whole blocks, its columns no whole steps."""
    (entry,) = MEASURED
    assert not refusal(entry.gated, 128, 2 * 1408, 2048, is_gated=True)
    reason = refusal(entry.down, 128, 2048, 1408, is_gated=False)
    assert reason == "depth: 1408 is no multiple of 256"
    single = dataclasses.replace(entry.down, unroll=1)
    assert not refusal(single, 128, 2048, 1408, is_gated=False)


def test_what_was_measured_is_in_order_and_fits() -> None:
    assert [entry.rows for entry in MEASURED] == sorted({entry.rows for entry in MEASURED})
    for entry in MEASURED:
        assert entry.gated.block_n == 128
        assert is_legal(entry.gated, HOPPER)
        assert is_legal(entry.down, HOPPER)
