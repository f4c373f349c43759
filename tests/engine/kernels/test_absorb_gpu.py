"""Fused steps of few tokens against their references, on a GPU or in Triton's interpreter.

See `test_fused_gpu` for how that is run.
"""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention import absorb_reference
from engine.attention.latent_storage import to_storage
from engine.attention.paged_queries import PagedQueries
from engine.attention.rectangle import Rectangle
from engine.formats.fp8_rows import Fp8Rows
from engine.kernels import reference
from engine.kernels.rotation import Rotation
from engine.ops.latents import SPLIT_LATENTS
from engine.ops.routing_rule import RoutingRule
from tests.engine.relative_error import relative_error
from tests.engine.triton_device import DEVICE, IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    # Of the interpreter, where a loop's bounds come from memory.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

DTYPE = torch.float16 if IS_INTERPRETED else torch.bfloat16
"""The interpreter multiplies the bits of bfloat16."""
TOKENS = [1, 5, 33] if IS_INTERPRETED else [1, 5, 32, 64, 100, 128, 256, 300]
HEADS = 3 if IS_INTERPRETED else 128
NOPE, ROPE, RANK = 128, 64, 256 if IS_INTERPRETED else 512
BF16 = 2e-2
"""One unit in the last of 8 bits is 0.8 %; the interpreter cuts instead of rounding."""
ROWS = PagedQueries(block_tables_SB=torch.zeros(1, 1), seq_lens_S=torch.ones(1))
E4M3 = 0.15 if IS_INTERPRETED else 0.07
"""Half a step of 3 bits is 6 %; the interpreter cuts, and in the scale of a step."""


def load(name: str) -> Any:
    return importlib.import_module(f"engine.{name}")


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def draw_rotation(num_tokens: int, *, interleave: bool) -> Rotation:
    angles = torch.rand(num_tokens, ROPE // 2, device=DEVICE) * 6
    return Rotation(cos=angles.cos(), sin=angles.sin(), interleave=interleave)


def draw_weight() -> Tensor:
    """Return the second half of every head's rows: a view, as in the model."""
    data = torch.randn(HEADS, 2 * NOPE, RANK, device=DEVICE) / RANK**0.5
    wide: Tensor = data.to(DTYPE)
    return wide[:, NOPE:]


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("interleave", [True, False])
def test_absorb_queries(num_tokens: int, interleave: bool) -> None:
    q, weight = draw(num_tokens, HEADS, NOPE + ROPE), draw_weight()
    rotation, cache = draw_rotation(num_tokens, interleave=interleave), torch.empty(0)
    exact = absorb_reference.absorb_queries(q.float(), weight.float(), rotation, cache, ROWS)
    actual = load("kernels.fused.absorb").absorb_queries(q, weight, rotation, DTYPE)
    assert actual.dtype == DTYPE
    assert relative_error(actual, exact) < (1e-2 if IS_INTERPRETED else 4e-3)
    torch.testing.assert_close(
        actual[..., RANK:], exact[..., RANK:].to(DTYPE), rtol=BF16, atol=1e-2
    )
    rounded = load("kernels.fused.absorb").absorb_queries(q, weight, rotation, torch.float8_e4m3fn)
    assert rounded.dtype == torch.float8_e4m3fn
    assert relative_error(rounded, exact) < E4M3
    if not IS_INTERPRETED:
        assert torch.equal(rounded.float(), to_storage(actual, torch.float8_e4m3fn).float())


def test_queries_saturate_and_keep_nan() -> None:
    q, weight = draw(2, HEADS, NOPE + ROPE), draw_weight()
    q[0] *= 3e3
    q[1, :, 5], q[1, :, -1] = float("nan"), float("nan")
    rotation = draw_rotation(2, interleave=True)
    rounded = (
        load("kernels.fused.absorb")
        .absorb_queries(q, weight, rotation, torch.float8_e4m3fn)
        .float()
    )
    assert rounded[0].abs().max() == 448.0
    assert not rounded[0].isnan().any()
    if not IS_INTERPRETED:  # which knows no NaN of e4m3
        assert rounded[1, :, :RANK].isnan().all()
        assert rounded[1, :, -2:].isnan().all()
        assert not rounded[1, :, RANK:-2].isnan().any()


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_expand_values(num_tokens: int) -> None:
    latents, weight = draw(num_tokens, HEADS, RANK), draw_weight()
    exact = absorb_reference.expand(latents.float(), weight.float())
    plain = load("kernels.fused.absorb").expand_values(latents, weight, fp8=False)
    assert plain.shape == (num_tokens, HEADS * 128)
    assert relative_error(plain, exact) < (1e-2 if IS_INTERPRETED else 4e-3)
    rows = load("kernels.fused.absorb").expand_values(latents, weight, fp8=True)
    assert isinstance(rows, Fp8Rows)
    expected = reference.quantize_rows(plain)
    torch.testing.assert_close(rows.scale_TG, expected.scale_TG, rtol=0, atol=0)
    assert rows.scale_TG.stride() == expected.scale_TG.stride()
    assert relative_error(rows.dequantize(), expected.dequantize()) < (
        0.15 if IS_INTERPRETED else 2e-2
    )


def draw_rectangle(counts: list[int], width: int) -> Rectangle:
    starts = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
    return Rectangle.of(starts, width, sum(counts))


RECTANGLES = [([4, 1, 3], 4), ([1, 0, 2, 0], 4), ([4] * 16 + [0], 4), ([2] * 20, 3)]


@pytest.mark.parametrize(("counts", "width"), RECTANGLES)
def test_queries_come_as_a_rectangle(counts: list[int], width: int) -> None:
    """Gathering rows on the way in gives what gathering them afterwards does."""
    rectangle, kernel = draw_rectangle(counts, width), load("kernels.fused.absorb")
    q, weight = draw(sum(counts), HEADS, NOPE + ROPE), draw_weight()
    rotation = draw_rotation(len(q), interleave=True)
    plain = kernel.absorb_queries(q, weight, rotation, DTYPE)
    spread = kernel.absorb_queries(q, weight, rotation, DTYPE, rows_R=rectangle.rows)
    assert spread.shape[0] == len(counts) * width
    assert torch.equal(spread[..., RANK:], rectangle.spread(plain)[..., RANK:])
    # Tiles of other heights may add up in another order.
    assert relative_error(spread, rectangle.spread(plain).float()) < BF16
    again = kernel.absorb_queries(q, weight, rotation, DTYPE, rows_R=rectangle.rows)
    assert torch.equal(spread, again)


@pytest.mark.parametrize(("counts", "width"), RECTANGLES)
def test_values_are_found_in_a_rectangle(counts: list[int], width: int) -> None:
    rectangle, kernel = draw_rectangle(counts, width), load("kernels.fused.absorb")
    latents, weight = draw(len(counts) * width, HEADS, RANK), draw_weight()
    for fp8 in (False, True):
        found = kernel.expand_values(latents, weight, fp8=fp8, places_T=rectangle.places)
        expected = kernel.expand_values(rectangle.collect(latents), weight, fp8=fp8)
        if isinstance(found, Fp8Rows):
            assert torch.equal(found.scale_TG, expected.scale_TG)
            found, expected = found.data_TK.view(torch.uint8), expected.data_TK.view(torch.uint8)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("q_rank", [128, 384, 1536])
@pytest.mark.parametrize("dtype", [DTYPE, torch.float8_e4m3fn])
def test_split_latents(num_tokens: int, interleave: bool, q_rank: int, dtype: torch.dtype) -> None:
    source, weight, q_weight = draw(num_tokens, q_rank + RANK + ROPE), draw(RANK), draw(q_rank)
    rotation = draw_rotation(num_tokens, interleave=interleave)
    slots = torch.randperm(6 * 64, device=DEVICE)[:num_tokens]
    pools = [
        to_storage(torch.full((6, 3, 64, RANK + ROPE), 7.0), dtype).to(DEVICE) for _ in range(2)
    ]
    rows, expected = (
        split(source, q_weight, weight, 1e-6, rotation, cache=pool[:, 1], slots_T=slots)
        for split, pool in zip(
            (load("ops.latents_kernel").split_latents, SPLIT_LATENTS.reference), pools, strict=True
        )
    )
    torch.testing.assert_close(rows.scale_TG, expected.scale_TG, rtol=BF16, atol=0)
    assert rows.scale_TG.stride() == expected.scale_TG.stride()
    assert relative_error(rows.dequantize(), expected.dequantize()) < (
        0.15 if IS_INTERPRETED else 2e-2
    )
    if dtype == DTYPE:
        torch.testing.assert_close(pools[0], pools[1], rtol=BF16, atol=1e-3)
    written = [pool[:, 1].flatten(0, 1)[slots].float() for pool in pools]
    assert relative_error(*written) < (0.3 if IS_INTERPRETED else 2e-2)
    assert (pools[0][:, 0].float() == 7.0).all()


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("num_experts", "size"), [(16, 320), (256, 1792), (256, 7168)])
def test_experts_are_scored_in_parts(num_tokens: int, num_experts: int, size: int) -> None:
    if IS_INTERPRETED and size > 2000:
        pytest.skip("slow in the interpreter")
    routing = load("ops.gate_kernel")
    hidden, weight = draw(num_tokens, size + 64)[:, :size], draw(num_experts, size)
    assert IS_INTERPRETED or routing.takes(hidden, weight)
    parts = routing.score_in_parts(hidden, weight)
    exact = hidden.double() @ weight.double().t()
    assert relative_error(parts.double().sum(0), exact) < 1e-6
    rule = RoutingRule(
        top_k=3, n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5
    )
    bias = torch.randn(num_experts, device=DEVICE) * 0.1
    total = parts[0].clone()
    for part in parts[1:]:  # in the order of the kernel
        total += part
    scaled = [logits / 64 for logits in (parts, total)]  # exactly
    (ids, weights), (expected_ids, expected_weights) = (
        routing.group_limited_topk(logits, bias, rule) for logits in scaled
    )
    assert torch.equal(ids, expected_ids)
    assert torch.equal(weights, expected_weights)
