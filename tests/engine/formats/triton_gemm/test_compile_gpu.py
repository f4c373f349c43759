"""Tiles compile for GPUs that are not here, and take no more shared memory than was reckoned.

Needs Triton and no GPU: its compiler is told which one to build for. Outside of the suite of a CPU
machine because it takes minutes there; `make kernels-check` has it.
"""

import importlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.paged_queries import PagedQueries
from engine.attention.torch_attention import TorchAttention
from engine.formats.expert_rows import AlignedRows
from engine.formats.fp8_block import Fp8Block
from engine.formats.stored_weight import StoredWeight
from engine.formats.triton_gemm.candidates import candidates, shared_memory
from engine.formats.triton_gemm.limits import ADA, AMPERE, HOPPER, DeviceLimits
from engine.formats.triton_gemm.tiles import ProductShape, RowLayout
from engine.kernels.base import KernelSet
from engine.kernels.create import choose_target
from engine.kernels.rotation import Rotation
from engine.ops.latents import STORE_LATENTS
from engine.ops.masked import MOE_ALIGN_MASKED, PERMUTE_MASKED_ROWS
from engine.ops.permute import MOE_ALIGN_BLOCK_SIZE
from engine.ops.table import resolve_ops
from tests.engine.elsewhere import Elsewhere, compiling_only
from tests.engine.triton_device import IS_INTERPRETED

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

NUM_TILES = 4
"""Drawn anew each time, of each kind of GPU."""


@pytest.fixture
def driver() -> Iterator[Any]:
    pytest.importorskip("triton")
    if IS_INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    driver = importlib.import_module("triton.runtime.driver").driver
    yield driver
    if torch.cuda.is_available():
        driver.reset_active()


@pytest.mark.parametrize("limits", [AMPERE, ADA, HOPPER], ids=["ampere", "ada", "hopper"])
@pytest.mark.parametrize("layout", list(RowLayout))
def test_tiles_compile_within_their_memory(
    driver: Any, limits: DeviceLimits, layout: RowLayout
) -> None:
    shape = ProductShape(layout=layout, num_rows=4096, num_columns=512, depth=1024, num_experts=4)
    module = importlib.import_module("engine.formats.triton_gemm.gemm")
    driver.set_active(Elsewhere(limits.sm))
    num_groups = 4 if layout is RowLayout.MASKED else 1
    job = module.Product(
        layout=layout,
        rows=(
            torch.empty(num_groups, 4096, 1024, dtype=torch.float8_e4m3fn),
            torch.empty(num_groups, 8, 4096).transpose(1, 2),
        ),
        weight=(
            torch.empty(4, 512, 1024, dtype=torch.float8_e4m3fn),
            torch.empty(4, 4, 8),
        ),
        experts=torch.empty(4096, dtype=torch.int32),
        out=torch.empty(num_groups, 4096, 512, dtype=torch.bfloat16),
    )
    tiles = candidates(shape, limits)
    largest = max(tiles, key=lambda tile: shared_memory(tile, limits))
    for tile in (tiles[0], largest, *random.sample(tiles, NUM_TILES)):
        compiled = job.compile(tile, widen=not limits.has_fp8)
        assert compiled.metadata.shared <= shared_memory(tile, limits), tile


@pytest.mark.parametrize("limits", [AMPERE, ADA], ids=["ampere", "ada"])
@pytest.mark.usefixtures("driver")
def test_products_and_attention_compile(
    limits: DeviceLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    with compiling_only(monkeypatch, limits.sm) as compiled:
        run_products_and_attention(limits)
    assert len(compiled) > 8
    assert {"up", "down"} <= {name for name, _ in compiled}, "experts behind the capacity"
    assert all(kernel is not None for _, kernel in compiled)


def run_products_and_attention(limits: DeviceLimits) -> None:
    gemm = importlib.import_module("engine.formats.triton_gemm.gemm").TritonGemm(limits)
    paged_mla = importlib.import_module("engine.attention.paged_mla.attention")
    fp8 = Fp8Block(importlib.import_module("engine.formats.fp8_triton").of_gemm(gemm))
    attention = importlib.import_module("engine.attention.gpu_kernels").GpuAttention(
        heads=TorchAttention(), pages=paged_mla.PagedMLA(limits), fuses_absorption=False
    )
    ops = resolve_ops(choose_target(KernelSet.TRITON, limits))

    def bf16(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    ids = torch.zeros(4, 2, dtype=torch.int64)
    w13, w2 = (
        StoredWeight(torch.zeros(2, n, 256, dtype=torch.float8_e4m3fn), torch.zeros(2, n // 128, 2))
        for n in (512, 256)
    )
    rotation = Rotation(cos=torch.zeros(4, 32), sin=torch.zeros(4, 32))
    assert fp8.rows is not None
    rows = fp8.rows.quantize_rows(bf16(4, 256))
    aligned = AlignedRows.permute(ops, rows, ops[MOE_ALIGN_BLOCK_SIZE](ids, 0, 2, 128))
    masked = ops[PERMUTE_MASKED_ROWS](rows, ops[MOE_ALIGN_MASKED](ids, 0, 2, 128))
    fp8.linear(rows, StoredWeight(*(part[0] for part in w13.pair())))
    fp8.grouped_mlp(aligned, w13, w2)
    fp8.masked_mlp(masked, w13, w2)
    cache, slots = bf16(2, 64, 576), torch.zeros(4, dtype=torch.int64)
    tables, lengths = (torch.zeros(shape, dtype=torch.int32) for shape in ((4, 3), (4,)))
    queries = PagedQueries(block_tables_SB=tables, seq_lens_S=lengths)
    for layer in (cache, cache.to(torch.float8_e4m3fn)):
        ops[STORE_LATENTS](bf16(4, 576), bf16(512), 1e-6, rotation, cache=layer, slots_T=slots)
        paged = attention.plan_paged(queries, layer, 8)
        attention.paged_attention(bf16(4, 8, 576), layer, paged, 512, 0.1)
    lse = torch.zeros(8, 4)
    attention.merge_attention(bf16(4, 8, 128), lse, bf16(4, 8, 128), lse)
