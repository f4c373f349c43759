"""The kernels for Hopper, their source run on a CPU (see `fake_gluon`): what they read and when.

On a GPU `test_paged_mla_gpu` runs them as they are compiled. Needs Triton, and no GPU.
"""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.paged_mla.parts import parts_on_host
from tests.engine.attention.paged_mla.cases import PagedCase, attend_exactly, draw_case
from tests.engine.attention.paged_mla.fake_gluon import Described, run
from tests.engine.relative_error import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

RANK, QUARTER, ROPE, TILE, SCALE, LOG2_E = 512, 128, 64, 64, 0.06, 1.4426950408889634
CASES = {
    "one": [(1, 1)],
    "edges": [(1, 64), (1, 65), (1, 63), (1, 128), (1, 129)],
    "empty": [(1, 0), (1, 200), (1, 0)],
    "long": [(1, 700), (1, 5)],
    "cut": [(1, 1500), (1, 330)],
    "many": [(1, 70), (1, 0), (1, 1), (1, 0)] * 4,
    "several": [(3, 3), (17, 150), (1, 70), (2, 128)],
}


def modules(*names: str) -> list[Any]:
    pytest.importorskip("triton.experimental.gluon")
    return [importlib.import_module(f"engine.attention.paged_mla.{name}") for name in names]


def attend(case: PagedCase, num_places: int, scale: float = SCALE) -> Tensor:
    """Attend in as many parts as a GPU of so many multiprocessors would; merge by hand."""
    is_fp8 = case.cache.dtype == torch.float8_e4m3fn
    names = ("hopper_latents", "hopper_e4m3") if is_fp8 else ("hopper_kernel",)
    found = modules("hopper_pieces", *names)
    num_heads = case.q_THL.shape[1]
    tiles = [-(-queries * num_heads // TILE) for queries, _ in case.lengths]
    table, _ = parts_on_host(case.lengths, tiles, num_places)
    grid, max_rows = (max(tiles), len(table)), max(tiles) * TILE
    (launcher,) = modules("hopper_attention")
    rows = launcher.as_rows(case.cache)
    width = RANK if is_fp8 else QUARTER
    latents: list[Any] = [Described(rows, (TILE, columns)) for columns in (width, ROPE)]
    if is_fp8:
        latents = [rows, rows.stride(0)]
    flat_q = case.q_THL.view(-1, RANK + ROPE)
    q = [Described(flat_q, (TILE, columns)) for columns in (width, ROPE)]
    out = torch.full((len(case.q_THL), num_heads, RANK), float("nan"), dtype=torch.float16)
    pieces = torch.full((2 * len(table) * max_rows, RANK), float("nan"))
    logs = torch.full((2 * len(table) * max_rows,), float("nan"))
    run(
        found, grid,
        *latents,
        *q, case.block_tables, case.seq_lens, case.cu_seqlens_q, torch.from_numpy(table),
        out, pieces, logs, num_heads, scale * LOG2_E, case.cache.stride(0) // (RANK + ROPE),
        case.block_tables.shape[1],
        BLOCK_TILES=case.cache.shape[1] // TILE, ONE_QUERY=case.max_queries == 1,
    )  # fmt: skip
    merge(case, table.tolist(), out, pieces.view(-1, max_rows, RANK), logs.view(-1, max_rows))
    return out


def merge(
    case: PagedCase, table: list[list[int]], out: Tensor, pieces: Tensor, logs: Tensor
) -> None:
    """Put together what is in several parts, as `kernel.merge` does."""
    num_heads, starts = out.shape[1], case.cu_seqlens_q.tolist()
    for seq, (queries, _) in enumerate(case.lengths):
        mine = [part for part, (first, last, *_) in enumerate(table) if first <= seq <= last]
        if len(mine) == 1:
            continue
        slots = [2 * mine[0] + 1, *(2 * part for part in mine[1:])]
        count = queries * num_heads
        weights = logs[slots, :count].mul(0.6931471805599453).softmax(dim=0)
        rows = torch.einsum("sr,src->rc", weights, pieces[slots, :count])
        out[starts[seq] : starts[seq + 1]] = rows.view(queries, num_heads, RANK)


def draw(
    lengths: list[tuple[int, int]], num_heads: int, pool_dtype: torch.dtype, block_size: int
) -> PagedCase:
    """Draw queries in bfloat16 for latents in e4m3, which have a type of their own."""
    return draw_case(
        lengths,
        num_heads=num_heads,
        rank=RANK,
        rope=ROPE,
        dtype=torch.float16 if pool_dtype == torch.float16 else torch.bfloat16,
        pool_dtype=pool_dtype,
        block_size=block_size,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("pool_dtype", [torch.float16, torch.float8_e4m3fn], ids=["16", "e4m3"])
@pytest.mark.parametrize("block_size", [64, 128])
def test_every_tile_is_there_when_it_is_used(
    lengths: list[tuple[int, int]], num_heads: int, pool_dtype: torch.dtype, block_size: int
) -> None:
    case = draw(lengths, num_heads, pool_dtype, block_size)
    expected = attend_exactly(case, RANK, SCALE)
    for num_places in (1, 5, 13):
        assert relative_error(attend(case, num_places), expected) < 2e-3


@pytest.mark.parametrize("pool_dtype", [torch.float16, torch.float8_e4m3fn], ids=["16", "e4m3"])
@pytest.mark.parametrize("scale", [1e-4, 0.3, 3.0])
def test_tops_of_rows_rise_by_little_or_much(pool_dtype: torch.dtype, scale: float) -> None:
    case = draw([(1, 1500), (2, 260)], 16, pool_dtype, 64)
    expected = attend_exactly(case, RANK, scale)
    for num_places in (1, 5):
        assert relative_error(attend(case, num_places, scale), expected) < 2e-3
