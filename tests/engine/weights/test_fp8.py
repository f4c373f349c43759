"""Block FP8: the bound on the rounding error, shapes that no block divides, and bad input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.weights.fp8 import E4M3_MAX, dequantize_block, quantize_block, scale_shape

SIZES = st.integers(min_value=1, max_value=300)


def _weight(rows: int, columns: int, seed: int, exponent: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * 10.0**exponent


@settings(max_examples=40, deadline=None)
@given(rows=SIZES, columns=SIZES, seed=st.integers(0, 999), exponent=st.integers(-12, 12))
def test_error_is_bounded_in_every_block(rows: int, columns: int, seed: int, exponent: int) -> None:
    weight = _weight(rows, columns, seed, exponent)
    quantised, scale_inv = quantize_block(weight)
    assert quantised.dtype == torch.float8_e4m3fn
    assert quantised.shape == weight.shape
    assert scale_inv.dtype == torch.float32
    assert tuple(scale_inv.shape) == scale_shape(rows, columns)
    restored = dequantize_block(quantised, scale_inv)
    for p in range(scale_inv.shape[0]):
        for q in range(scale_inv.shape[1]):
            block = (slice(p * 128, (p + 1) * 128), slice(q * 128, (q + 1) * 128))
            amax = weight[block].abs().max()
            torch.testing.assert_close(scale_inv[p, q] * E4M3_MAX, amax)
            # Three bits of mantissa: half a step is 1/16 of a normal number; subnormals stop at
            # half of 2**-9 times the scale.
            allowed = weight[block].abs() / 16 + scale_inv[p, q] * 2.0**-10
            assert bool(((restored[block] - weight[block]).abs() <= allowed * 1.0001).all())


@settings(max_examples=20, deadline=None)
@given(rows=SIZES, columns=SIZES, seed=st.integers(0, 999))
def test_quantising_again_changes_nothing(rows: int, columns: int, seed: int) -> None:
    quantised, scale_inv = quantize_block(_weight(rows, columns, seed))
    restored = dequantize_block(quantised, scale_inv)
    again, scale_again = quantize_block(restored)
    torch.testing.assert_close(dequantize_block(again, scale_again), restored, rtol=1e-6, atol=0)


def test_a_block_knows_only_itself() -> None:
    weight = _weight(256, 256, seed=1)
    before, _ = quantize_block(weight)
    weight[:128, :128] *= 1000
    after, scale_inv = quantize_block(weight)
    assert torch.equal(before[128:].float(), after[128:].float())
    assert float(scale_inv[0, 0]) > 100 * float(scale_inv[1, 1])


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 3e38])
def test_extreme_blocks_stay_finite(value: float) -> None:
    restored = dequantize_block(*quantize_block(torch.full((130, 5), value)))
    assert bool(torch.isfinite(restored).all())
    assert float((restored - value).abs().max()) <= max(value / 16, 1e-40)


def test_another_block_size() -> None:
    weight = _weight(70, 33, seed=2)
    quantised, scale_inv = quantize_block(weight, block=32)
    assert tuple(scale_inv.shape) == (3, 2)
    restored = dequantize_block(quantised, scale_inv, block=32)
    assert float((restored - weight).abs().max()) < 0.3


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="non-empty matrix"):
        quantize_block(torch.zeros(3))
    with pytest.raises(ValueError, match="non-empty matrix"):
        quantize_block(torch.zeros(0, 4))
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_block(torch.tensor([[1.0, float("nan")]]))
    quantised, scale_inv = quantize_block(torch.ones(200, 100))
    with pytest.raises(ValueError, match="needs \\(2, 1\\)"):
        dequantize_block(quantised, scale_inv[:1])
