"""Tiles fit the GPUs that they are for."""

from dataclasses import replace

import pytest
import torch

from engine.attention.paged_mla.tiles import (
    HOPPER_TILE,
    PagedTile,
    PoolShape,
    candidates,
    is_legal,
    shared_memory,
)
from engine.formats.triton_gemm.limits import ADA, AMPERE, HOPPER, DeviceLimits

BF16 = PoolShape(latent_dim=576, block_size=64, is_fp8=False)


@pytest.mark.parametrize("limits", [AMPERE, ADA, HOPPER], ids=["ampere", "ada", "hopper"])
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("num_rows", [8, 16, 64, 20_000])
def test_candidates_are_legal_and_differ(limits: DeviceLimits, is_fp8: bool, num_rows: int) -> None:
    pool = replace(BF16, is_fp8=is_fp8)
    found = candidates(limits, num_rows, pool)
    assert len(set(found)) == len(found) >= 1
    for tile in found:
        assert is_legal(tile, limits, pool)
        assert min(tile.block_m, tile.block_n) >= 16


def test_hopper_takes_wide_tiles_where_there_are_rows_for_them() -> None:
    wide, few = (candidates(HOPPER, rows, BF16)[0] for rows in (128, 16))
    assert wide == HOPPER_TILE
    assert few.block_m == 16
    assert shared_memory(wide, HOPPER, BF16) > 3 * 2 * 64 * 576


@pytest.mark.parametrize(
    ("limits", "pool"),
    [
        (AMPERE, BF16),
        (replace(HOPPER, sm=100), BF16),
        (HOPPER, replace(BF16, latent_dim=288)),
        (HOPPER, replace(BF16, block_size=32)),
    ],
    ids=["ampere", "blackwell", "narrow", "small-blocks"],
)
def test_other_gpus_and_pools_run_the_portable_kernel(
    limits: DeviceLimits, pool: PoolShape
) -> None:
    assert all(not tile.is_hopper for tile in candidates(limits, 128, pool))


def test_programs_that_share_a_multiprocessor_share_its_memory() -> None:
    tile = PagedTile(block_m=16, block_n=32, num_warps=4, num_stages=3, per_sm=2)
    assert is_legal(tile, HOPPER, BF16)
    assert not is_legal(tile, AMPERE, BF16)


def test_a_pool_s_shape_is_read_off_a_layer() -> None:
    layer = torch.zeros(3, 2, 8, 48)[:, 1].to(torch.float8_e4m3fn)
    assert PoolShape.of(layer) == PoolShape(latent_dim=48, block_size=8, is_fp8=True)
