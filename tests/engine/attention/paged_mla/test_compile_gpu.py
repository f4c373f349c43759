"""The kernel compiles for GPUs that are not here, and takes no more memory than was reckoned.

Needs Triton and no GPU: its compiler is told which one to build for.
"""

import importlib
from dataclasses import replace

import pytest
import torch

from engine.attention.paged_mla.tiles import PoolShape, candidates, shared_memory
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
    attention = importlib.import_module("engine.attention.paged_mla.attention")
    cache = torch.zeros(3, 64, LATENT, dtype=torch.bfloat16)
    cache = cache.to(torch.float8_e4m3fn) if is_fp8 else cache
    tables, lens = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    starts = torch.zeros(3, dtype=torch.int32)
    counts = QueryCounts(cu_seqlens_q=starts, most=num_queries)
    queries = PagedQueries(block_tables_SB=tables, seq_lens_S=lens)
    if num_queries > 1:
        queries = replace(queries, counts=counts)
    kernel = attention.PagedMLA(limits)
    with compiling_only(monkeypatch, limits.sm) as compiled:
        planned = kernel.plan(queries, cache, num_heads)
        q_THL = torch.zeros(2 * num_queries, num_heads, LATENT, dtype=torch.bfloat16)
        kernel.paged_attention(q_THL, cache, planned, RANK, 0.1)
    found = dict(compiled)
    assert {"_schedule", "attend", "merge"} <= set(found)
    pool = PoolShape.of(cache)
    tile = candidates(limits, num_heads * num_queries, pool)[0]
    bound = shared_memory(tile, limits, pool)
    assert found["attend"].metadata.shared <= bound <= limits.shared_memory
