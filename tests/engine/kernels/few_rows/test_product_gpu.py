"""The product of few rows against the reference: poisoned outputs, ragged shapes, any strides.

Also runs on a CPU in Triton's interpreter: TRITON_INTERPRET=1 pytest -m gpu, on small shapes.
"""

import importlib
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.few_rows.cuts import Cut, candidates
from engine.kernels.few_rows.tables import CutEntry, CutTable
from engine.kernels.fp8_rows import Fp8Rows, packed_row_bytes
from engine.kernels.triton_gemm.limits import HOPPER
from engine.weights.fp8 import quantize_block

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("default"),
]

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
SAME_INPUTS = 1e-2 if IS_INTERPRETED else 5e-3
"""Relative error: bfloat16 results (the interpreter cuts), sums in another order."""

SMALL = Cut(block_n=64, num_splits=1, num_warps=4, num_stages=3)


def gemm() -> Any:
    module = importlib.import_module("engine.kernels.few_rows.gemm")
    if not IS_INTERPRETED and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    return module


def draw_rows(num_rows: int, depth: int, layout: str = "columns") -> Fp8Rows:
    """Return random rows, their scales column by column (to be padded), packed, or row by row."""
    rows = reference.quantize_rows(torch.randn(num_rows, depth, device=DEVICE))
    if layout == "columns":
        return rows
    if layout == "rows":
        return Fp8Rows(data_TK=rows.data_TK, scale_TG=rows.scale_TG.contiguous())
    buffer = torch.zeros(num_rows, packed_row_bytes(depth), dtype=torch.uint8, device=DEVICE)
    out = Fp8Rows.packed(buffer, depth)
    out.data_TK.view(torch.uint8).copy_(rows.data_TK.view(torch.uint8))
    out.scale_TG.copy_(rows.scale_TG)
    return out


def draw_weight(num_columns: int, depth: int) -> tuple[Tensor, Tensor]:
    return quantize_block(torch.randn(num_columns, depth, device=DEVICE) / depth**0.5)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert not actual.isnan().any()
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < SAME_INPUTS, float(error)


@pytest.mark.parametrize("layout", ["columns", "rows", "packed"])
@pytest.mark.parametrize("num_rows", [1, 16, 23, 64, 100, 128])
def test_any_rows_in_any_layout(num_rows: int, layout: str) -> None:
    x, weight = draw_rows(num_rows, 640, layout), draw_weight(200, 640)
    expected = reference.fp8_linear(x, *weight)
    arrivals = gemm().Arrivals()
    for splits in (1, 3):
        cut = Cut(block_n=64, num_splits=splits, num_warps=8, num_stages=3)
        assert_close(gemm().multiply(x, *weight, cut, arrivals), expected)


@pytest.mark.parametrize("block_n", [64, 128, 256])
@pytest.mark.parametrize("splits", [1, 2, 5, 7])
@pytest.mark.parametrize("reads_ahead", [False, True])
def test_any_cut(block_n: int, splits: int, reads_ahead: bool) -> None:
    unroll = 1 if splits == 7 else 2
    cut = Cut(
        block_n=block_n,
        num_splits=splits,
        num_warps=8,
        num_stages=3,
        unroll=unroll,
        reads_ahead=reads_ahead,
    )
    depth = 896 * unroll
    x, weight = draw_rows(16, depth), draw_weight(330, depth)
    arrivals = gemm().Arrivals()
    assert_close(gemm().multiply(x, *weight, cut, arrivals), reference.fp8_linear(x, *weight))


@pytest.mark.skipif(IS_INTERPRETED, reason="too large for the interpreter")
@pytest.mark.parametrize("num_rows", [1, 16, 48, 64, 128])
@pytest.mark.parametrize(("num_columns", "depth"), [(2112, 7168), (7168, 2048), (24576, 1536)])
def test_every_candidate_of_a_real_shape(num_rows: int, num_columns: int, depth: int) -> None:
    x, weight = draw_rows(num_rows, depth), draw_weight(num_columns, depth)
    expected, arrivals = reference.fp8_linear(x, *weight), gemm().Arrivals()
    cuts = candidates(num_rows, num_columns, depth, HOPPER)
    for cut in cuts[:: max(1, len(cuts) // 12)]:
        assert_close(gemm().multiply(x, *weight, cut, arrivals), expected)


def test_counters_are_zero_again_and_results_are_the_same_every_time() -> None:
    x, weight, arrivals = draw_rows(5, 640), draw_weight(192, 640), gemm().Arrivals()
    cut = Cut(block_n=64, num_splits=5, num_warps=4, num_stages=3)
    first = gemm().multiply(x, *weight, cut, arrivals)
    for _ in range(2 if IS_INTERPRETED else 50):
        assert torch.equal(gemm().multiply(x, *weight, cut, arrivals), first)
    assert not arrivals.take(first.device).any()


@pytest.mark.skipif(IS_INTERPRETED, reason="needs a GPU")
def test_streams_do_not_share_counters_and_graphs_replay() -> None:
    x, weight, arrivals = draw_rows(64, 7168), draw_weight(2112, 7168), gemm().Arrivals()
    cut = Cut(block_n=64, num_splits=7, num_warps=4, num_stages=4)
    expected = gemm().multiply(x, *weight, cut, arrivals)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    another = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        gemm().multiply(x, *weight, cut, arrivals)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs = [gemm().multiply(x, *weight, cut, arrivals) for _ in range(4)]
    for _ in range(20):
        graph.replay()
        own = gemm().multiply(x, *weight, cut, arrivals)
        with torch.cuda.stream(another):
            other = gemm().multiply(x, *weight, cut, arrivals)
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in (*outs, own, other))


class Others:
    """Stands for DeepGEMM, and remembers who asked."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def linear(self, x: Fp8Rows, weight_NK: Tensor, scale_inv_PQ: Tensor) -> Tensor:
        self.rows.append(x.num_rows)
        return reference.fp8_linear(x, weight_NK, scale_inv_PQ)

    def grouped_linear(self, *_: Any) -> Tensor:
        raise AssertionError

    def masked_linear(self, *_: Any) -> Tensor:
        raise AssertionError


def test_others_take_what_the_table_does_not_name() -> None:
    entry = CutEntry(
        num_rows=16,
        num_columns=192,
        depth=256,
        cut=SMALL,
        microseconds=1.0,
        deep_gemm_microseconds=2.0,
    )
    others = Others()
    both = gemm().FewRowsGemm(others, CutTable(device="any", entries=(entry,)))
    for num_rows, columns in ((16, 192), (5, 192), (17, 192), (0, 192), (16, 320)):
        x, weight = draw_rows(num_rows, 256), draw_weight(columns, 256)
        out = both.linear(x, *weight)
        assert out.shape == (num_rows, columns)
        if num_rows:
            assert_close(out, reference.fp8_linear(x, *weight))
    assert others.rows == [17, 0, 16]
