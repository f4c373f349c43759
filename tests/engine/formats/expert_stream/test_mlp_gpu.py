"""Streamed experts against the reference: uneven rows, poisoned outputs, NaN where no row is.

They also run on a CPU in Triton's interpreter, on small shapes (TRITON_INTERPRET=1 pytest -m gpu).
"""

import importlib
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.formats.expert_stream.tiles import (
    MEASURED,
    StreamTile,
    StreamTiles,
    is_legal,
    shared_memory,
)
from engine.formats.fp8_rows import Fp8Rows
from engine.formats.triton_gemm.limits import HOPPER
from engine.kernels import expert_reference, reference
from engine.kernels.fused.dependent import dependent_launches
from engine.kernels.masked_rows import MaskedRows, empty_masked
from engine.ops.activation import SILU_AND_MUL
from engine.weights.fp8 import dequantize_block, quantize_block
from runtime.errors import InternalError
from tests.engine.formats.triton_gemm.test_compile_gpu import Elsewhere, driver
from tests.engine.relative_error import relative_error
from tests.engine.triton_device import DEVICE, IS_INTERPRETED

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

__all__ = ["driver"]

PRODUCT = 1e-2 if IS_INTERPRETED else 6e-3
"""Relative error of a product: bfloat16 results (the interpreter cuts), sums in another order."""

ROUNDING = 1.05
"""Error of activated numbers over the reference's own, which comes of rounding them to e4m3."""

CUT = 0.125 if IS_INTERPRETED else 0.0
"""What is added to it: the interpreter cuts the bits behind the third, also of 447.9999."""

MLP = 0.15 if IS_INTERPRETED else 4e-2
"""Relative error of both, down to one row.

The reference rounds to bfloat16 between them, so e4m3 falls apart.
"""

NUM_SMS = 3 if IS_INTERPRETED else 132

TILES = [entry.gated for entry in MEASURED] + [
    StreamTile(block_m=16, num_stages=4),
    StreamTile(block_m=64, num_warps=8, num_stages=4),
]
DOWN_TILES = [*TILES, StreamTile(block_m=16, block_n=64, unroll=2, num_stages=3, per_sm=2)]


@pytest.fixture
def mlp(poisoned_memory: None) -> Any:
    if not IS_INTERPRETED and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    return importlib.import_module("engine.formats.expert_stream.mlp")


def draw_experts(number: int, num_rows: int, num_columns: int) -> tuple[Tensor, Tensor]:
    pairs = [
        quantize_block(torch.randn(num_rows, num_columns, device=DEVICE) / num_columns**0.5)
        for _ in range(number)
    ]
    return torch.stack([w for w, _ in pairs]), torch.stack([s for _, s in pairs])


def draw_rows(counts: list[int], num_columns: int, max_rows: int = 128) -> MaskedRows:
    """Return random rows, and NaN in data and scales beyond them."""
    data, scale = empty_masked(len(counts), max_rows, num_columns, DEVICE)
    for expert, count in enumerate(counts):
        part = reference.quantize_rows(torch.randn(count, num_columns, device=DEVICE))
        data.view(torch.uint8)[expert, :count] = part.data_TK.view(torch.uint8)
        scale[expert, :count] = part.scale_TG
    return MaskedRows(
        data_LMD=data,
        scale_LMG=scale,
        num_rows_L=torch.tensor(counts, dtype=torch.int32, device=DEVICE),
        expected_rows=16,
    )


def rows_of(rows: MaskedRows, expert: int, count: int) -> Tensor:
    mine = Fp8Rows(data_TK=rows.data_LMD[expert, :count], scale_TG=rows.scale_LMG[expert, :count])
    return mine.dequantize()


def weight_of(weight: tuple[Tensor, Tensor], expert: int) -> Tensor:
    return dequantize_block(weight[0][expert], weight[1][expert])


COUNTS = [[3, 0, 128, 17], [0, 0, 0, 1], [16, 33, 64, 65]]
WIDTHS = (512, 256) if IS_INTERPRETED else (4096, 2048)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("counts", COUNTS)
def test_gate_and_up_are_activated_and_quantised(
    mlp: Any, tile: StreamTile, counts: list[int]
) -> None:
    hidden_size, width = WIDTHS
    rows, w13 = draw_rows(counts, hidden_size), draw_experts(4, 2 * width, hidden_size)
    out = mlp.gated_product(rows, w13, tile, num_sms=NUM_SMS)
    assert out.scale_LMG.stride() == (width // 128 * 128, 1, 128)
    for expert, count in enumerate(counts):
        assert out.scale_LMG[expert, count:].isnan().all()  # never touched
        if count:
            exact = rows_of(rows, expert, count) @ weight_of(w13, expert).T
            exact = SILU_AND_MUL.reference(exact)
            own = relative_error(reference.quantize_rows(exact).dequantize(), exact)
            assert relative_error(rows_of(out, expert, count), exact) < ROUNDING * own + CUT


@pytest.mark.parametrize("tile", DOWN_TILES)
@pytest.mark.parametrize("counts", COUNTS)
def test_plain_product(mlp: Any, tile: StreamTile, counts: list[int]) -> None:
    hidden_size, width = WIDTHS
    rows, w2 = draw_rows(counts, width), draw_experts(4, hidden_size, width)
    out = mlp.down_product(rows, w2, tile, num_sms=NUM_SMS)
    for expert, count in enumerate(counts):
        assert out[expert, count:].isnan().all()
        if count:
            exact = rows_of(rows, expert, count) @ weight_of(w2, expert).T
            assert relative_error(out[expert, :count], exact) < PRODUCT


@pytest.mark.parametrize("num_experts", [1, 3, 5])
@pytest.mark.parametrize("max_rows", [128, 256])
def test_mlp(mlp: Any, num_experts: int, max_rows: int) -> None:
    counts = [random.choice([0, 1, 7, 16, 40]) for _ in range(num_experts - 1)] + [130]
    counts[-1] = min(counts[-1], max_rows)
    rows = draw_rows(counts, 512, max_rows)
    w13, w2 = draw_experts(num_experts, 512, 512), draw_experts(num_experts, 512, 256)
    tiles = StreamTiles(rows=16, gated=TILES[0], down=DOWN_TILES[-1])
    stream = mlp.ExpertStream((tiles,), NUM_SMS)
    assert stream.takes(rows, w13, w2)
    out = stream.masked_fp8_mlp(rows, w13, w2)
    expected = expert_reference.masked_fp8_mlp(rows, w13, w2)
    for expert, count in enumerate(counts):
        if count:
            assert relative_error(out[expert, :count], expected[expert, :count]) < MLP


def test_what_is_not_streamed(mlp: Any) -> None:
    tiles = StreamTiles(rows=15, gated=TILES[0], down=TILES[0])
    rows = draw_rows([1], 512)
    w13, w2 = draw_experts(1, 512, 512), draw_experts(1, 512, 256)
    assert not mlp.ExpertStream((tiles,), NUM_SMS).takes(rows, w13, w2)  # more rows expected
    assert not mlp.ExpertStream((), NUM_SMS).takes(rows, w13, w2)
    narrow = draw_experts(1, 384, 512), draw_experts(1, 512, 128)
    tiles = StreamTiles(rows=16, gated=TILES[0], down=TILES[0])
    assert not mlp.ExpertStream((tiles,), NUM_SMS).takes(rows, *narrow)


@pytest.mark.parametrize("hidden_size", [256, 384, 512])
@pytest.mark.parametrize("width", [128, 192, 256, 384, 1408])
@pytest.mark.parametrize("max_rows", [64, 128])
def test_what_is_taken_runs_and_nothing_else(
    mlp: Any, hidden_size: int, width: int, max_rows: int
) -> None:
    """Widths of experts that are an odd number of groups of 128, 1408 among them."""
    if IS_INTERPRETED and width > 1000 and (hidden_size, max_rows) != (256, 128):
        pytest.skip("slow in the interpreter")
    rows = draw_rows([3, 0], hidden_size, max_rows)
    w13, w2 = draw_experts(2, 2 * width, hidden_size), draw_experts(2, hidden_size, width)
    taken = []
    for unroll in (1, 2):
        tile = StreamTile(block_m=16, unroll=unroll, num_stages=3)
        stream = mlp.ExpertStream((StreamTiles(rows=16, gated=tile, down=tile),), NUM_SMS)
        if stream.takes(rows, w13, w2):
            out, expected = (
                run(rows, w13, w2)
                for run in (stream.masked_fp8_mlp, expert_reference.masked_fp8_mlp)
            )
            assert relative_error(out[0, :3], expected[0, :3]) < MLP
            taken.append(unroll)
        else:
            with pytest.raises(InternalError, match="multiple"):
                stream.masked_fp8_mlp(rows, w13, w2)
    is_even = hidden_size % 256 == width % 256 == 0
    assert taken == ([1, 2] if is_even else [1] if width % 128 == hidden_size % 256 == 0 else [])


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter captures nothing")
def test_counts_are_read_when_a_graph_is_replayed(mlp: Any) -> None:
    rows = draw_rows([40, 40], 512)
    w13, w2 = draw_experts(2, 512, 512), draw_experts(2, 512, 256)
    tiles = StreamTiles(rows=16, gated=TILES[0], down=TILES[0])
    stream = mlp.ExpertStream((tiles,), NUM_SMS)
    expected = stream.masked_fp8_mlp(rows, w13, w2).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = stream.masked_fp8_mlp(rows, w13, w2)
    for counts in ([0, 0], [3, 40], [33, 1]):
        rows.num_rows_L.copy_(torch.tensor(counts, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        for expert, count in enumerate(counts):
            assert torch.equal(out[expert, :count], expected[expert, :count])


def compile_elsewhere(driver: Any, tile: StreamTile, *, is_gated: bool) -> Any:
    module = importlib.import_module("engine.formats.expert_stream.mlp")
    stream = importlib.import_module("engine.formats.expert_stream.kernel").stream
    driver.set_active(Elsewhere(HOPPER.sm))
    rows = MaskedRows(
        data_LMD=torch.empty(4, 128, 512, dtype=torch.float8_e4m3fn),
        scale_LMG=torch.empty(4, 4, 128).transpose(1, 2),
        num_rows_L=torch.empty(4, dtype=torch.int32),
        expected_rows=16,
    )
    weight = torch.empty(4, 512, 512, dtype=torch.float8_e4m3fn), torch.empty(4, 4, 4)
    data = torch.empty(4, 128, 256 if is_gated else 512, dtype=torch.float8_e4m3fn)
    out = (data, torch.empty(4, 2, 128)) if is_gated else (data.bfloat16(), rows.scale_LMG)
    return module.launch(rows, weight, out, tile, num_sms=NUM_SMS, run=stream.warmup)


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("tile", DOWN_TILES)
def test_tiles_compile_to_what_was_reckoned(driver: Any, is_gated: bool, tile: StreamTile) -> None:
    if is_gated and tile.block_n != 128:
        pytest.skip("rows of 128 are quantised together")
    assert is_legal(tile, HOPPER)
    compiled = compile_elsewhere(driver, tile, is_gated=is_gated)
    assert compiled.metadata.shared <= shared_memory(tile)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert "ld.local" not in compiled.asm["ptx"]
    assert "griddepcontrol" not in compiled.asm["ptx"]


def test_a_dependent_launch_waits_before_it_reads(driver: Any) -> None:
    with dependent_launches():
        compiled = compile_elsewhere(driver, TILES[0], is_gated=True)
    assert compiled.metadata.launch_pdl
    code = compiled.asm["ptx"]
    assert code.index("griddepcontrol.wait") < code.index("ld.global")
