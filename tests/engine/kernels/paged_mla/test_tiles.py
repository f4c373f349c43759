"""Tiles fit the GPUs that they are for."""

import pytest

from engine.kernels.paged_mla.tiles import PagedTile, candidates, is_legal, shared_memory
from engine.kernels.triton_gemm.limits import ADA, AMPERE, HOPPER, DeviceLimits

LATENT = 576


@pytest.mark.parametrize("limits", [AMPERE, ADA, HOPPER], ids=["ampere", "ada", "hopper"])
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("num_rows", [8, 16, 64, 20_000])
def test_candidates_are_legal_and_differ(limits: DeviceLimits, is_fp8: bool, num_rows: int) -> None:
    found = candidates(limits, num_rows, latent_dim=LATENT, is_fp8=is_fp8)
    assert len(set(found)) == len(found) >= 1
    for tile in found:
        assert is_legal(tile, limits, latent_dim=LATENT, is_fp8=is_fp8)
        assert min(tile.block_m, tile.block_n) >= 16


def test_hopper_takes_wide_tiles_where_there_are_rows_for_them() -> None:
    wide, few = (candidates(HOPPER, rows, latent_dim=LATENT, is_fp8=False)[0] for rows in (128, 16))
    assert (wide.block_m, few.block_m) == (64, 16)
    assert shared_memory(wide, HOPPER, latent_dim=LATENT, is_fp8=False) == 3 * 2 * 64 * LATENT


def test_programs_that_share_a_multiprocessor_share_its_memory() -> None:
    tile = PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, per_sm=2)
    assert is_legal(tile, HOPPER, latent_dim=LATENT, is_fp8=False)
    assert not is_legal(tile, AMPERE, latent_dim=LATENT, is_fp8=False)
