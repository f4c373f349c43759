"""How products of few rows are cut: what is tried fits the GPU, fills it, and covers all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.few_rows.cuts import (
    MAX_NUMBERS_PER_THREAD,
    MAX_ROWS,
    SUMMED_PER_THREAD,
    Cut,
    block_m_of,
    candidates,
    is_legal,
)
from engine.kernels.triton_gemm.limits import ADA, AMPERE, HOPPER

ROWS = st.integers(1, MAX_ROWS)
COLUMNS = st.integers(1, 40000)
DEPTHS = st.integers(1, 150).map(lambda blocks: blocks * 128)
CUTS = st.builds(
    Cut,
    block_n=st.sampled_from([64, 128, 256]),
    num_splits=st.integers(1, 16),
    num_warps=st.sampled_from([4, 8]),
    num_stages=st.integers(2, 8),
)


@given(ROWS)
def test_rows_are_rounded_up_to_a_power_of_two(num_rows: int) -> None:
    block = block_m_of(num_rows)
    assert num_rows <= block <= max(16, 2 * num_rows - 1)
    assert block & (block - 1) == 0


@pytest.mark.parametrize("num_rows", [0, MAX_ROWS + 1])
def test_other_numbers_of_rows_are_refused(num_rows: int) -> None:
    with pytest.raises(AssertionError):
        block_m_of(num_rows)


@given(ROWS, COLUMNS, DEPTHS)
def test_there_is_something_to_try_and_all_of_it_runs(
    num_rows: int, num_columns: int, depth: int
) -> None:
    cuts = candidates(num_rows, num_columns, depth, HOPPER)
    assert cuts
    for cut in cuts:
        assert is_legal(cut, num_rows, depth, HOPPER)
        assert cut.shared_memory(num_rows) <= HOPPER.shared_memory
        assert cut.num_splits <= depth // 128
        in_thread = cut.block_n * block_m_of(num_rows) // (32 * cut.num_warps)
        assert in_thread <= MAX_NUMBERS_PER_THREAD


@pytest.mark.parametrize("num_rows", [1, 16, 64, 128])
@pytest.mark.parametrize(
    ("num_columns", "depth"),
    [(7168, 16384), (24576, 1536), (2112, 7168), (4096, 7168), (7168, 2048), (36864, 7168)],
)
def test_real_products_fill_the_gpu(num_rows: int, num_columns: int, depth: int) -> None:
    for cut in candidates(num_rows, num_columns, depth, HOPPER):
        programs = cut.num_tiles(num_columns) * cut.num_splits
        assert programs >= HOPPER.num_sms * 3 // 4
        resident = HOPPER.shared_memory // cut.shared_memory(num_rows) * HOPPER.num_sms
        assert cut.num_splits == 1 or programs <= resident


@pytest.mark.parametrize("limits", [AMPERE, ADA])
def test_other_gpus_have_no_cut(limits: object) -> None:
    assert candidates(16, 4096, 4096, limits) == ()  # type: ignore[arg-type]


@given(CUTS, ROWS, COLUMNS)
def test_parts_and_sums(cut: Cut, num_rows: int, num_columns: int) -> None:
    assert (cut.num_tiles(num_columns) - 1) * cut.block_n < num_columns
    assert cut.num_tiles(num_columns) * cut.block_n >= num_columns
    room = cut.partial_numbers(num_columns, num_rows)
    assert room >= cut.num_splits * num_rows * num_columns or cut.num_splits == 1
    rows = cut.sum_rows(num_rows)
    assert 1 <= rows <= block_m_of(num_rows)
    assert rows & (rows - 1) == 0
    in_flight = rows * cut.block_n * cut.num_splits // (32 * cut.num_warps)
    assert in_flight <= SUMMED_PER_THREAD or rows == 1
