"""Sets of kernels put together from what is here: shapes that a library refuses go to another.

On a GPU or in Triton's interpreter; see `test_fused_gpu` for how that is run.
"""

import importlib
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention import flash_attention
from engine.attention.kernels import VarlenAttention, VarlenLengths
from engine.attention.torch_attention import TorchAttention
from engine.formats.base import Formats
from engine.formats.expert_stream.tiles import MEASURED
from engine.formats.fp8_block import Fp8Block
from engine.formats.plain import PLAIN
from engine.formats.stored_weight import StoredWeight
from engine.formats.triton_gemm.limits import AMPERE, HOPPER, DeviceLimits
from engine.kernels import expert_reference, reference
from engine.kernels.base import Kernels
from engine.kernels.create import choose_heads
from engine.kernels.masked_rows import MaskedRows, empty_masked
from engine.ops.op import Target
from engine.ops.table import resolve_ops
from engine.weights.fp8 import quantize_block
from tests.engine.formats.fp8 import fp8_of
from tests.engine.relative_error import relative_error
from tests.engine.triton_device import DEVICE, IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]

MLP = 0.15 if IS_INTERPRETED else 4e-2
"""Relative error; the interpreter cuts to e4m3 and bfloat16 where a GPU rounds."""


def load(name: str) -> Any:
    return importlib.import_module(f"engine.{name}")


def gemm_of(limits: DeviceLimits) -> Any:
    if not IS_INTERPRETED and limits.has_fp8 and not DeviceLimits.of(DEVICE).has_fp8:
        pytest.skip("this GPU has no FP8")
    return load("formats.triton_gemm.gemm").TritonGemm(limits)


def formats_of(products: Any) -> Formats:
    return Formats(plain=PLAIN, quantized=(Fp8Block(products),))


def attention_of(heads: VarlenAttention, *, fuses_absorption: bool = True) -> Any:
    module = load("attention.gpu_kernels")
    return module.GpuAttention(heads=heads, fuses_absorption=fuses_absorption)


def hopper() -> Kernels:
    """The set of Hopper, with our own products in place of the library's."""
    if not IS_INTERPRETED and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    products = load("formats.fp8_products").GemmProducts(
        gemm=gemm_of(HOPPER),
        quantizers=load("formats.fp8_triton").IN_HARDWARE,
        overflow=load("formats.triton_gemm.overflow").OverflowExperts(HOPPER),
        experts=load("formats.expert_stream.mlp").ExpertStream(
            MEASURED, 3 if IS_INTERPRETED else 132
        ),
    )
    return Kernels(
        name="hopper",
        formats=formats_of(products),
        attention=attention_of(choose_heads()),
        ops=resolve_ops(Target.HOPPER),
    )


def ampere() -> Kernels:
    return Kernels(
        name="ampere",
        formats=formats_of(load("formats.fp8_triton").of_gemm(gemm_of(AMPERE))),
        attention=attention_of(TorchAttention(), fuses_absorption=False),
        ops=resolve_ops(Target.NO_E4M3),
    )


def draw_experts(number: int, num_rows: int, num_columns: int) -> tuple[Tensor, Tensor]:
    pairs = [
        quantize_block(torch.randn(num_rows, num_columns, device=DEVICE) / num_columns**0.5)
        for _ in range(number)
    ]
    return torch.stack([w for w, _ in pairs]), torch.stack([s for _, s in pairs])


def draw_rows(counts: list[int], num_columns: int) -> MaskedRows:
    data, scale = empty_masked(len(counts), 128, num_columns, DEVICE)
    for expert, count in enumerate(counts):
        part = reference.quantize_rows(torch.randn(count, num_columns, device=DEVICE))
        data.view(torch.uint8)[expert, :count] = part.data_TK.view(torch.uint8)
        scale[expert, :count] = part.scale_TG
    return MaskedRows(
        data_LMD=data,
        scale_LMG=scale,
        num_rows_L=torch.tensor(counts, dtype=torch.int32, device=DEVICE),
        expected_rows=4,
    )


@pytest.mark.parametrize(
    ("make", "width", "counts"),
    [(hopper, 256, [2, 0, 1]), (hopper, 1408, [3]), (ampere, 384, [0, 3])],
)
def test_experts_of_any_width_are_served(make: Any, width: int, counts: list[int]) -> None:
    """1408 is an odd number of groups of 128, which streamed products of two a step refuse."""
    kernels, hidden_size, number = make(), 256, len(counts)
    rows = draw_rows(counts, hidden_size)
    w13 = draw_experts(number, 2 * width, hidden_size)
    w2 = draw_experts(number, hidden_size, width)
    out = fp8_of(kernels).masked_mlp(rows, StoredWeight(*w13), StoredWeight(*w2))
    expected = expert_reference.masked_fp8_mlp(rows, w13, w2)
    for expert, count in enumerate(counts):
        if count:
            assert relative_error(out[expert, :count], expected[expert, :count]) < MLP


@pytest.mark.parametrize("make", [hopper, ampere])
@pytest.mark.parametrize(
    ("key_width", "value_width"),
    # Those with a kernel of PyTorch for all sequences, and one that is too wide for it.
    [(64, 64), (192, 128), (24, 40) if IS_INTERPRETED else (288, 128)],
)
def test_heads_of_any_width_are_served(
    make: Any,
    key_width: int,
    value_width: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(flash_attention, "is_available", lambda: False)
    lengths = [(3, 3), (1, 9), (5, 7)]
    num_queries, num_positions = (sum(pair[i] for pair in lengths) for i in (0, 1))
    q = torch.randn(num_queries, 2, key_width, device=DEVICE).bfloat16()
    k = torch.randn(num_positions, 2, key_width, device=DEVICE).bfloat16()
    v = torch.randn(num_positions, 2, value_width, device=DEVICE).bfloat16()
    ends = torch.tensor([(0, 0), *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ends = ends.to(DEVICE)
    seqs = VarlenLengths(
        lengths=lengths,
        cu_seqlens_q=ends[:, 0].contiguous(),
        cu_seqlens_k=ends[:, 1].contiguous(),
    )
    attention, is_alone = make().attention, make is ampere
    with caplog.at_level(logging.INFO):
        actual = attention.varlen_attention(q, k, v, seqs, 0.2)
        part, lse = attention.varlen_attention_part(q, k, v, seqs, 0.2, is_causal=False)
    assert caplog.text.count("is by PyTorch") == (0 if is_alone else 1)
    exact = (q.float(), k.float(), v.float(), lengths, 0.2)
    assert relative_error(actual, reference.varlen_attention(*exact)) < 2e-2
    whole, weight = reference.varlen_attention_part(*exact, is_causal=False)
    assert relative_error(part, whole) < 2e-2
    torch.testing.assert_close(lse, weight, rtol=2e-2, atol=2e-2)
