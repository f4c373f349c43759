"""The Triton product and its quantisation against the references: poisoned outputs, any strides.

What an Ampere or an Ada GPU would run is run here too, by passing its limits: the widening form
needs nothing of Ampere, and Ada's tiles fit everywhere. They also run on a CPU in Triton's
interpreter: TRITON_INTERPRET=1 pytest -m gpu, on small shapes.
"""

import importlib
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows, packed_row_bytes
from engine.formats.triton_gemm.candidates import candidates, shared_memory
from engine.formats.triton_gemm.limits import ADA, AMPERE, HOPPER, DeviceLimits
from engine.formats.triton_gemm.tiles import ProductShape, RowLayout, TileConfig
from engine.kernels import reference
from engine.kernels.masked_rows import MaskedRows, empty_masked
from engine.ops.activation import SILU_AND_MUL
from engine.weights.fp8 import quantize_block
from tests.engine.relative_error import relative_error
from tests.engine.triton_device import DEVICE, IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("default"),
]

SAME_INPUTS = 1e-2 if IS_INTERPRETED else 5e-3
"""Relative error: bfloat16 results (the interpreter cuts), sums in another order."""

LIMITS = pytest.mark.parametrize("limits", [AMPERE, ADA, HOPPER], ids=["ampere", "ada", "hopper"])


def gemm_of(limits: DeviceLimits) -> Any:
    module = importlib.import_module("engine.formats.triton_gemm.gemm")
    if not IS_INTERPRETED and not DeviceLimits.of(DEVICE).has_fp8 and limits.has_fp8:
        pytest.skip("this GPU has no FP8")
    return module.TritonGemm(limits)


def draw_rows(num_rows: int, num_columns: int, *, packed: bool = False) -> Fp8Rows:
    rows = reference.quantize_rows(torch.randn(num_rows, num_columns, device=DEVICE))
    if not packed:
        return rows
    buffer = torch.zeros(num_rows, packed_row_bytes(num_columns), dtype=torch.uint8, device=DEVICE)
    out = Fp8Rows.packed(buffer, num_columns)
    out.data_TK.view(torch.uint8).copy_(rows.data_TK.view(torch.uint8))
    out.scale_TG.copy_(rows.scale_TG)
    return out


def draw_weight(num_rows: int, num_columns: int) -> tuple[Tensor, Tensor]:
    return quantize_block(torch.randn(num_rows, num_columns, device=DEVICE) / num_columns**0.5)


def draw_experts(number: int, num_rows: int, num_columns: int) -> tuple[Tensor, Tensor]:
    pairs = [draw_weight(num_rows, num_columns) for _ in range(number)]
    return torch.stack([w for w, _ in pairs]), torch.stack([s for _, s in pairs])


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = SAME_INPUTS) -> None:
    assert relative_error(actual, expected) < tolerance


SHAPES = (
    [(1, 96, 128), (70, 160, 384), (130, 320, 256)]
    if IS_INTERPRETED
    else [(1, 2112, 7168), (77, 1536, 512), (513, 832, 256), (4099, 7168, 2048)]
)


@LIMITS
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("num_rows", "num_columns", "depth"), SHAPES)
def test_linear(
    limits: DeviceLimits, packed: bool, num_rows: int, num_columns: int, depth: int
) -> None:
    x, weight = draw_rows(num_rows, depth, packed=packed), draw_weight(num_columns, depth)
    actual = gemm_of(limits).linear(x, *weight)
    assert actual.shape == (num_rows, num_columns)
    assert_close(actual, reference.fp8_linear(x, *weight))


@LIMITS
def test_no_rows(limits: DeviceLimits) -> None:
    weight = draw_weight(256, 128)
    assert gemm_of(limits).linear(draw_rows(0, 128), *weight).shape == (0, 256)


def tiles_to_try(limits: DeviceLimits) -> list[TileConfig]:
    """Return the extremes, and some drawn anew each time."""
    tiles = {
        tile
        for num_rows in (16, 128, 4096)
        for tile in candidates(
            ProductShape(layout=RowLayout.PLAIN, num_rows=num_rows, num_columns=4096, depth=4096),
            limits,
        )
    }
    ordered = sorted(tiles, key=lambda tile: shared_memory(tile, limits))
    drawn = random.sample(ordered, 2 if IS_INTERPRETED else 8)
    return [ordered[0], ordered[-1], *drawn]


@LIMITS
def test_every_tile_gives_the_same_product(limits: DeviceLimits) -> None:
    gemm = gemm_of(limits)
    module = importlib.import_module("engine.formats.triton_gemm.gemm")
    num_rows, num_columns, depth = (70, 260, 384) if IS_INTERPRETED else (150, 520, 640)
    x, weight = draw_rows(num_rows, depth), draw_weight(num_columns, depth)
    expected = reference.fp8_linear(x, *weight)
    for tile in tiles_to_try(limits):
        out = torch.empty((1, num_rows, num_columns), dtype=torch.bfloat16, device=DEVICE)
        job = module.Product(
            layout=RowLayout.PLAIN,
            rows=(x.data_TK.unsqueeze(0), x.scale_TG.unsqueeze(0)),
            weight=(weight[0].unsqueeze(0), weight[1].unsqueeze(0)),
            experts=x.scale_TG,
            out=out,
        )
        job.launch(tile, widen=gemm.widens)
        assert_close(out[0], expected)


@LIMITS
def test_all_numbers_of_the_format_are_multiplied_exactly(limits: DeviceLimits) -> None:
    bits = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    bits = bits[(bits & 0x7F) != 0x7F]  # but for NaN
    data = torch.zeros(256, 128, dtype=torch.uint8, device=DEVICE)
    data[: len(bits), 0] = bits
    x = Fp8Rows(data_TK=data.view(torch.float8_e4m3fn), scale_TG=torch.ones(256, 1, device=DEVICE))
    one = torch.zeros(64, 128, device=DEVICE)
    one[:, 0] = 1.0
    weight = one.to(torch.float8_e4m3fn), torch.ones(1, 1, device=DEVICE)
    out = gemm_of(limits).linear(x, *weight)
    assert torch.equal(out[:, 5].float(), x.data_TK[:, 0].float())


@LIMITS
def test_aligned_rows_and_blocks_of_no_expert(limits: DeviceLimits) -> None:
    weight = draw_experts(3, 320, 256)
    names = [2, -1, 0, 2, -1, -1]
    experts = torch.tensor(names, dtype=torch.int32, device=DEVICE).repeat_interleave(128)
    x = draw_rows(len(experts), 256)
    actual = gemm_of(limits).grouped_linear(x, experts, *weight)
    for block, expert in enumerate(names):
        rows = slice(block * 128, block * 128 + 128)
        if expert < 0:
            assert actual[rows].isnan().all()  # never touched
        else:
            part = Fp8Rows(data_TK=x.data_TK[rows], scale_TG=x.scale_TG[rows])
            expected = reference.fp8_linear(part, weight[0][expert], weight[1][expert])
            assert_close(actual[rows], expected)


@LIMITS
@pytest.mark.parametrize("expected_rows", [1, 40, 128])
def test_masked_rows(limits: DeviceLimits, expected_rows: int) -> None:
    counts = [3, 0, 128, 65]
    weight = draw_experts(4, 192, 256)
    data, scale = empty_masked(4, 128, 256, DEVICE)
    for expert, count in enumerate(counts):
        part = draw_rows(count, 256)
        data.view(torch.uint8)[expert, :count] = part.data_TK.view(torch.uint8)
        scale[expert, :count] = part.scale_TG
    rows = MaskedRows(
        data_LMD=data,
        scale_LMG=scale,
        num_rows_L=torch.tensor(counts, dtype=torch.int32, device=DEVICE),
        expected_rows=expected_rows,
    )
    actual = gemm_of(limits).masked_linear(rows, *weight)
    for expert, count in enumerate(counts):
        part = Fp8Rows(data_TK=data[expert, :count], scale_TG=scale[expert, :count])
        if count:
            expected = reference.fp8_linear(part, weight[0][expert], weight[1][expert])
            assert_close(actual[expert, :count], expected)
    assert actual[1].isnan().all()  # an expert without rows costs nothing


def byte_quant() -> Any:
    return importlib.import_module("engine.formats.triton_gemm.byte_quant")


@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_bits_made_by_hand_are_those_of_the_format(num_rows: int) -> None:
    x = torch.randn(num_rows, 512, device=DEVICE).bfloat16()[:, 128:]
    x[0, :8] = torch.tensor([0.0, 1e-3, -1e-3, 1e-4, 2e-5, 5e-2, -5.0, 7.0]) * 60
    x[-1, 128:256] = 0.0
    actual, expected = byte_quant().quantize_rows(x), reference.quantize_rows(x)
    torch.testing.assert_close(actual.scale_TG, expected.scale_TG, rtol=1e-6, atol=0)
    # Divisions may round differently: then a number is one step of the format off.
    codes = actual.data_TK.view(torch.uint8).int() - expected.data_TK.view(torch.uint8).int()
    assert codes.abs().max() <= 1
    assert (codes != 0).float().mean() < 1e-2


def test_ties_go_to_even_and_small_numbers_keep_their_bits() -> None:
    steps = torch.arange(127, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).float()
    halves = (steps[1:] + steps[:-1]) / 2
    x = torch.zeros(2, 128, device=DEVICE)
    x[0, :127], x[1, :126], x[1, 127] = steps, halves, 448.0  # a scale of 1
    actual = byte_quant().quantize_rows(x)
    assert torch.equal(actual.scale_TG, torch.ones(2, 1, device=DEVICE))
    assert torch.equal(actual.data_TK.float(), x.to(torch.float8_e4m3fn).float())


def test_not_a_number_stays_in_its_group() -> None:
    x = torch.randn(3, 256, device=DEVICE)
    x[1, 200] = float("nan")
    scales = byte_quant().quantize_rows(x).scale_TG
    assert scales.isnan().nonzero().tolist() == [[1, 1]]


def test_activation_skips_blocks_of_no_expert() -> None:
    x = torch.randn(256, 512, device=DEVICE).bfloat16()
    experts = torch.tensor([3] * 128 + [-1] * 128, dtype=torch.int32, device=DEVICE)
    out = byte_quant().silu_and_mul_fp8(x, experts)
    assert out.scale_TG[128:].isnan().all()
    expected = reference.quantize_rows(SILU_AND_MUL.reference(x[:128].float()))
    part = Fp8Rows(data_TK=out.data_TK[:128], scale_TG=out.scale_TG[:128])
    assert_close(part.dequantize(), expected.dequantize(), 2e-2)


def test_activation_of_masked_rows() -> None:
    counts = torch.tensor([2, 0, 64], dtype=torch.int32, device=DEVICE)
    gate_up = torch.randn(3, 64, 512, device=DEVICE).bfloat16()
    like = MaskedRows(data_LMD=gate_up, scale_LMG=gate_up, num_rows_L=counts, expected_rows=22)
    out = byte_quant().masked_silu_and_mul_fp8(gate_up, like)
    for expert, count in ((0, 2), (2, 64)):
        part = Fp8Rows(data_TK=out.data_LMD[expert, :count], scale_TG=out.scale_LMG[expert, :count])
        values = SILU_AND_MUL.reference(gate_up[expert, :count].float())
        expected = reference.quantize_rows(values).dequantize()
        assert_close(part.dequantize(), expected, 2e-2)
    assert out.scale_LMG[1].isnan().all()
