"""Bounds are those of arithmetic; calls pass through unchanged."""

import pytest
import torch

from engine.kernels.base import VarlenLengths
from engine.kernels.portable import PortableKernels
from engine.stage_timer import (
    BANDWIDTH,
    PEAK_BF16,
    PEAK_FP8,
    StageTimer,
    TimerMode,
    attention_operations,
)
from engine.weights.fp8 import quantize_block


def test_calls_pass_through_and_are_counted_by_shape() -> None:
    kernels = PortableKernels(has_fp8=True)
    timer = StageTimer(kernels)
    assert timer.has_fp8
    assert timer.name == kernels.name
    x, weight = torch.randn(64, 512), quantize_block(torch.randn(256, 512))
    expected = kernels.fp8_linear(kernels.quantize_rows(x), *weight)
    assert torch.equal(timer.fp8_linear(timer.quantize_rows(x), *weight), expected)
    assert timer.stages == {}, "off at first"
    timer.mode = TimerMode.BOUNDS
    timer.fp8_linear(timer.quantize_rows(x), *weight)
    assert set(timer.stages) == {"quantize_rows 512", "fp8_linear 256x512"}
    scales = 4 * 64 * 4
    moved = {"quantize_rows 512": 64 * 512 * 4 + 64 * 512 + scales}
    moved["fp8_linear 256x512"] = 64 * 512 + scales + 256 * 512 + 2 * 4 * 4 + 64 * 256 * 2
    for name, stage in timer.stages.items():
        operations = 2 * 64 * 512 * 256 if "linear" in name else 0
        assert stage.bound_s == pytest.approx(max(operations / PEAK_FP8, moved[name] / BANDWIDTH))
    timer.reset()
    assert timer.stages == {}


def test_causal_attention_counts_visible_pairs() -> None:
    q, k, v = torch.randn(5, 2, 24), torch.randn(9, 2, 24), torch.randn(9, 2, 16)
    ends = torch.tensor([0, 5], dtype=torch.int32)
    seqs = VarlenLengths(lengths=[(2, 6), (3, 3)], cu_seqlens_q=ends, cu_seqlens_k=ends)
    pairs = (5 + 6) + (1 + 2 + 3)
    assert attention_operations(q, v, seqs) == 2 * pairs * 2 * (24 + 16)
    timer = StageTimer(PortableKernels())
    timer.mode = TimerMode.BOUNDS
    timer.varlen_attention(q, k, v, seqs, 1.0)
    assert timer.stages["varlen_attention"].bound_s > 2 * pairs * 2 * 40 / PEAK_BF16 * 0.99
