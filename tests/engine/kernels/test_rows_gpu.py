"""Kernels that work on rows, at their edges: a row alone, an odd number of them, NaN in one.

Whatever a row holds, it changes no other; and it comes out the same alone as among others. Widths
are such as no power of two divides further than 128: 1408 is that of experts of several models. On
a GPU or in Triton's interpreter; see `test_fused_gpu` for how that is run.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.formats.triton_gemm.limits import HOPPER
from engine.kernels.alignment import Alignment
from engine.kernels.rotation import Rotation
from engine.ops.routing_rule import RoutingRule
from engine.weights.fp8 import quantize_block
from tests.engine.triton_device import DEVICE, IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    # Of the interpreter: NaN is what these are about.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

WIDTH, HEADS, ROPE, NUM_ROWS = 1408, 3, 64, 35
DOT = torch.float16 if IS_INTERPRETED else torch.bfloat16
"""The interpreter multiplies the bits of bfloat16."""

Rows = list[Tensor]
Run = Callable[[Tensor], Rows]


def load(name: str) -> Any:
    return importlib.import_module(f"engine.{name}")


def parts_of(rows: Fp8Rows) -> Rows:
    return [rows.data_TK.view(torch.uint8), rows.scale_TG]


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))  # the same for every number of rows
    return torch.randn(shape, generator=generator).to(DEVICE)


def rotation(num_rows: int) -> Rotation:
    angles = torch.full((num_rows, ROPE // 2), 0.7, device=DEVICE)
    return Rotation(cos=angles.cos(), sin=angles.sin())


def quantize(x: Tensor) -> Rows:
    return parts_of(load("kernels.fused.quant").quantize_rows(x))


def activate(x: Tensor) -> Rows:
    return parts_of(
        load("ops.activation_kernel").silu_and_mul_fp8(torch.cat((x, x.flip(1)), dim=1))
    )


def quantize_by_hand(x: Tensor) -> Rows:
    return parts_of(load("formats.triton_gemm.byte_quant").quantize_rows(x))


def norm(x: Tensor) -> Rows:
    weight, delta = draw(WIDTH).bfloat16(), x.flip(1)
    total, plain, rows = load("ops.norm_kernel").add_rms_norm_fp8(
        x, delta, weight, 1e-6, with_plain=True
    )
    return [total, plain, *parts_of(rows), load("ops.norm_kernel").rms_norm(x, weight, 1e-6)]


def merge(x: Tensor) -> Rows:
    out = x[:, : HEADS * 128].reshape(len(x), HEADS, 128).clone()
    lse = x[:, :HEADS].float().t().contiguous()
    return [load("kernels.fused.attention").merge_attention(out, lse, out.flip(2), lse.flip(0))[0]]


def rotate(x: Tensor) -> Rows:
    q = x[:, : HEADS * 192].reshape(len(x), HEADS, 192).clone()
    return [load("ops.latents_kernel").rotate_queries(q, rotation(len(x)))]


def store(x: Tensor) -> Rows:
    rank = 192
    cache = torch.zeros(NUM_ROWS, 3, rank + ROPE, dtype=x.dtype, device=DEVICE)
    slots = torch.arange(len(x), device=DEVICE) * 3 + 1
    load("ops.latents_kernel").store_latents(
        x[:, : rank + ROPE], draw(rank).to(x.dtype), 1e-6, rotation(len(x)),
        cache=cache, slots_T=slots,
    )  # fmt: skip
    assert not cache[:, ::2].any(), "neighbours stay as they were"
    return [cache[: len(x), 1]]


def split(x: Tensor) -> Rows:
    rank, wide = 192, torch.cat((x, x[:, : 192 + ROPE]), dim=1)
    cache = torch.zeros(NUM_ROWS, 1, rank + ROPE, dtype=x.dtype, device=DEVICE)
    rows = load("ops.latents_kernel").split_latents(
        wide, draw(WIDTH).to(x.dtype), draw(rank).to(x.dtype), 1e-6, rotation(len(x)),
        cache=cache, slots_T=torch.arange(len(x), device=DEVICE),
    )  # fmt: skip
    return [*parts_of(rows), cache[: len(x), 0]]


def join(x: Tensor) -> Rows:
    k = x[:, : HEADS * 256].reshape(len(x), HEADS, 256)[..., :128]
    return [load("ops.latents_kernel").join_keys(k, x[:, -ROPE:])]


def choose(x: Tensor) -> Rows:
    rule = RoutingRule(
        top_k=3, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=1.5
    )
    logits, bias = x[:, :32].float().contiguous(), torch.zeros(32, device=DEVICE)
    return [*load("ops.gate_kernel").group_limited_topk(logits, bias, rule)]


def gather(x: Tensor) -> Rows:
    count = len(x)
    rows = torch.arange(2 * count, dtype=torch.int32, device=DEVICE).view(count, 2)
    rows[:, 1] = -1
    places = Alignment(rows_TK=rows, expert_M=rows.new_zeros(2 * count))
    source = x.repeat_interleave(2, dim=0)
    weights = torch.full((count, 2), 0.5, device=DEVICE)
    return [load("ops.permute_kernel").unpermute_rows(source, places, weights, x.flip(1))]


def score(x: Tensor) -> Rows:
    weight = draw(16, WIDTH).to(DOT) / WIDTH**0.5
    return [load("ops.gate_kernel").score_in_parts(x.to(DOT), weight).sum(0)]


def absorb(x: Tensor) -> Rows:
    q = x[:, : HEADS * (128 + ROPE)].reshape(len(x), HEADS, 128 + ROPE).to(DOT).contiguous()
    weight = draw(HEADS, 128, 384).to(DOT) / 12
    return [load("kernels.fused.absorb").absorb_queries(q, weight, rotation(len(x)), DOT)]


def expand(x: Tensor) -> Rows:
    latents = x[:, : HEADS * 384].reshape(len(x), HEADS, 384).to(DOT).contiguous()
    weight = draw(HEADS, 128, 384).to(DOT) / 20
    return [load("kernels.fused.absorb").expand_values(latents, weight, fp8=False)]


def multiply(x: Tensor) -> Rows:
    rows = load("kernels.fused.quant").quantize_rows(x)
    weight = quantize_block(draw(96, WIDTH) / WIDTH**0.5)
    return [load("formats.triton_gemm.gemm").TritonGemm(HOPPER).linear(rows, *weight)]


EXACT: list[Run] = [
    quantize, activate, quantize_by_hand, norm, merge, rotate, store, split, join, choose,
    gather,
]  # fmt: skip
PRODUCTS: list[Run] = [score, absorb, expand, multiply]
"""Sums are made in another order where other numbers of rows are cut otherwise."""


def rows_of(run: Run, x: Tensor) -> Rows:
    return [part.clone() for part in run(x)]


def draw_rows() -> Tensor:
    return torch.randn(NUM_ROWS, WIDTH, device=DEVICE).bfloat16()


@pytest.mark.parametrize("run", [*EXACT, *PRODUCTS])
def test_a_row_alone_is_a_row_among_others(run: Run) -> None:
    x = draw_rows()
    together = rows_of(run, x)
    for row in (0, NUM_ROWS - 1):
        for alone, among in zip(rows_of(run, x[row : row + 1]), together, strict=True):
            assert alone.shape[0] == 1
            if run in EXACT:
                assert torch.equal(alone[0], among[row])
            else:
                torch.testing.assert_close(alone[0], among[row], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("run", [*EXACT, *PRODUCTS])
def test_a_row_that_is_not_a_number_changes_no_other(run: Run) -> None:
    x, spoilt = draw_rows(), [0, 16, 31, NUM_ROWS - 1]
    before = rows_of(run, x)
    assert not any(part.isnan().any() for part in before if part.is_floating_point())
    x[spoilt] = torch.nan
    kept = torch.ones(NUM_ROWS, dtype=torch.bool, device=DEVICE)
    kept[spoilt] = False
    for part, was in zip(rows_of(run, x), before, strict=True):
        assert torch.equal(part[kept], was[kept])
