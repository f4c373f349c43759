"""Candidates are legal on any GPU, there always is one, and good guesses come first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.formats.triton_gemm.candidates import (
    MAX_NUMBERS_PER_THREAD,
    candidates,
    is_legal,
    shared_memory,
)
from engine.formats.triton_gemm.limits import ADA, AMPERE, HOPPER, DeviceLimits
from engine.formats.triton_gemm.tiles import ProductShape, RowLayout

shapes = st.builds(
    ProductShape,
    layout=st.sampled_from(RowLayout),
    num_rows=st.integers(1, 1 << 20),
    num_columns=st.integers(1, 65536),
    depth=st.integers(1, 256).map(lambda groups: groups * 128),
    num_experts=st.integers(1, 256),
)
devices = st.builds(
    DeviceLimits,
    sm=st.sampled_from([80, 86, 87, 89, 90, 100, 103, 120]),
    shared_memory=st.integers(48 * 1024, 256 * 1024),
    num_sms=st.integers(1, 200),
)


@given(shapes, devices)
def test_every_candidate_fits_the_device_and_the_blocks(
    shape: ProductShape, limits: DeviceLimits
) -> None:
    tiles = candidates(shape, limits)
    assert tiles
    assert len(set(tiles)) == len(tiles)
    for tile in tiles:
        assert is_legal(tile, limits)
        assert shared_memory(tile, limits) <= limits.shared_memory
        assert 128 % tile.block_m == 0
        assert 128 % tile.block_k == 0
        assert shape.depth % tile.block_k == 0
        assert 128 % tile.block_n == 0 or tile.block_n % 128 == 0
        assert tile.block_m >= 16
        assert tile.numbers_per_thread <= MAX_NUMBERS_PER_THREAD


@given(shapes, devices)
def test_operands_in_flight_alone_fit_the_shared_memory(
    shape: ProductShape, limits: DeviceLimits
) -> None:
    for tile in candidates(shape, limits):
        in_flight = (tile.num_stages - 1) * (tile.block_m + tile.block_n) * tile.block_k
        assert in_flight < limits.shared_memory


@given(shapes, devices)
def test_the_order_is_the_same_every_time(shape: ProductShape, limits: DeviceLimits) -> None:
    assert candidates(shape, limits) == candidates(shape, limits)


@pytest.mark.parametrize("limits", [AMPERE, ADA, HOPPER], ids=["ampere", "ada", "hopper"])
def test_best_guesses(limits: DeviceLimits) -> None:
    def guess(layout: RowLayout, rows: int, experts: int = 1) -> tuple[int, int]:
        shape = ProductShape(
            layout=layout, num_rows=rows, num_columns=7168, depth=2048, num_experts=experts
        )
        tile = candidates(shape, limits)[0]
        return tile.block_m, tile.block_n

    assert guess(RowLayout.PLAIN, 4096) == (128, 128)
    assert guess(RowLayout.ALIGNED, 65536, 32) == (128, 128)
    # Few rows: narrow tiles, so that every multiprocessor reads a part of the weight.
    assert guess(RowLayout.PLAIN, 1)[0] == 16
    assert guess(RowLayout.PLAIN, 1)[1] < 128
    assert guess(RowLayout.MASKED, 16, 32) == (16, 128)


def test_less_shared_memory_means_fewer_candidates() -> None:
    shape = ProductShape(layout=RowLayout.PLAIN, num_rows=4096, num_columns=7168, depth=7168)
    small = DeviceLimits(sm=90, shared_memory=99 * 1024, num_sms=132)
    assert set(candidates(shape, small)) < set(candidates(shape, HOPPER))


@pytest.mark.parametrize("limits", [AMPERE, ADA, HOPPER], ids=["ampere", "ada", "hopper"])
def test_the_list_is_short_enough_to_be_timed(limits: DeviceLimits) -> None:
    for rows in (1, 64, 4096):
        shape = ProductShape(layout=RowLayout.PLAIN, num_rows=rows, num_columns=7168, depth=7168)
        assert 10 <= len(candidates(shape, limits)) <= 300
