"""The kernel compiles for GPUs that are not here, and takes no more memory than was reckoned.

Needs Triton and no GPU: its compiler is told which one to build for.
"""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.attention.paged_mla.tiles import (
    HOPPER_SHARED_MEMORY,
    HOPPER_TILE,
    VARIANTS,
    PagedTile,
    PoolShape,
    candidates,
    shared_memory,
)
from engine.attention.paged_queries import PagedQueries, QueryCounts
from engine.formats.triton_gemm.limits import ADA, AMPERE, HOPPER, DeviceLimits
from tests.engine.elsewhere import compiling_only
from tests.engine.triton_device import IS_INTERPRETED

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

LATENT, RANK = 576, 512


@pytest.mark.parametrize("limits", [AMPERE, ADA, HOPPER], ids=["ampere", "ada", "hopper"])
@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(("num_heads", "num_queries"), [(16, 1), (128, 1), (16, 17)])
def test_the_tile_that_runs_fits(
    limits: DeviceLimits,
    is_fp8: bool,
    num_heads: int,
    num_queries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    if IS_INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    pool = PoolShape.of(torch.zeros(1, 64, LATENT).to(_dtype(is_fp8)))
    tile = candidates(limits, num_heads * num_queries, pool)[0]
    found = compile_for(
        limits, tile, monkeypatch, num_heads=num_heads, num_queries=num_queries, is_fp8=is_fp8
    )
    assert {"_schedule", "attend", "merge"} <= set(found)
    bound = shared_memory(tile, limits, pool)
    assert found["attend"].metadata.shared <= bound <= limits.shared_memory


@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "e4m3"])
def test_all_kernels_for_hopper_fit(is_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if IS_INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    for tile in [HOPPER_TILE, *VARIANTS[is_fp8]]:
        found = compile_for(HOPPER, tile, monkeypatch, num_heads=128, num_queries=1, is_fp8=is_fp8)
        assert found["attend"].metadata.shared <= HOPPER_SHARED_MEMORY


def _dtype(is_fp8: bool) -> torch.dtype:
    return torch.float8_e4m3fn if is_fp8 else torch.bfloat16


def compile_for(
    limits: DeviceLimits,
    tile: PagedTile,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_heads: int,
    num_queries: int,
    is_fp8: bool,
) -> dict[str, Any]:
    """Return what a step of two sequences compiles, by name."""
    attention = importlib.import_module("engine.attention.paged_mla.attention")
    cache = torch.zeros(3, 64, LATENT).to(_dtype(is_fp8))
    tables, lens = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    starts = torch.zeros(3, dtype=torch.int32)
    counts = QueryCounts(cu_seqlens_q=starts, most=num_queries)
    queries = PagedQueries(block_tables_SB=tables, seq_lens_S=lens)
    if num_queries > 1:
        queries = replace(queries, counts=counts)
    kernel = attention.PagedMLA(limits, tile)
    with compiling_only(monkeypatch, limits.sm) as compiled:
        planned = kernel.plan(queries, cache, num_heads)
        q_THL = torch.zeros(2 * num_queries, num_heads, LATENT, dtype=torch.bfloat16)
        kernel.paged_attention(q_THL, cache, planned, RANK, 0.1)
    return dict(compiled)
