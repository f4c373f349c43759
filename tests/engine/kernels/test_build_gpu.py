"""Sets of kernels as a GPU gets them, with each part in its place.

Libraries that are not here are stood in for: Triton's interpreter runs all the rest.
"""

from types import SimpleNamespace

import pytest
import torch

from engine.attention import flash_attention, flash_mla
from engine.formats import deep_gemm
from engine.formats.stored_weight import StoredWeight
from engine.formats.triton_gemm.limits import ADA, AMPERE, HOPPER, DeviceLimits
from engine.kernels import create, reference
from engine.kernels.base import KernelSet
from engine.ops.op import Target
from engine.weights.fp8 import quantize_block
from tests.engine.formats.fp8 import fp8_of, quantize
from tests.engine.relative_error import relative_error
from tests.engine.triton_device import DEVICE, IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_INTERPRETED, reason="on GPUs whole sets are tested with libraries"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

LIBRARY = SimpleNamespace(
    linear=reference.fp8_linear, grouped_linear=lambda *_: None, masked_linear=lambda *_: None
)


@pytest.mark.parametrize(
    ("kind", "limits", "name", "target"),
    [
        (KernelSet.HOPPER, HOPPER, "hopper", Target.HOPPER),
        (KernelSet.TRITON, HOPPER, "triton on sm90", Target.TRITON),
        (KernelSet.TRITON, ADA, "triton on sm89", Target.TRITON),
        (KernelSet.TRITON, AMPERE, "triton on sm80", Target.NO_E4M3),
    ],
)
def test_a_set_multiplies_and_attends(
    kind: KernelSet,
    limits: DeviceLimits,
    name: str,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DeviceLimits, "of", classmethod(lambda cls, device: limits))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU without a table")
    monkeypatch.setattr(deep_gemm, "DeepGemm", lambda: LIBRARY)
    for library in (flash_attention, flash_mla):
        monkeypatch.setattr(library, "is_available", lambda: False)
    kernels = create._build(kind, torch.device("cpu"))
    assert (kernels.name, kernels.ops.target) == (name, target)
    assert kernels.formats.describe() == "FP8 in blocks of 128"
    assert kernels.attention.max_positions == 32768
    assert kernels.attention.why_no_pages(torch.empty(2, 64, 576).bfloat16(), 512) == ""

    x, weight = torch.randn(3, 256, device=DEVICE), torch.randn(128, 256, device=DEVICE)
    rows, stored = quantize(kernels, x.bfloat16()), StoredWeight(*quantize_block(weight))
    exact = x.bfloat16().float() @ weight.T
    assert relative_error(fp8_of(kernels).linear(rows, stored), exact) < 0.1


def test_only_hopper_streams_the_weights_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceLimits, "of", classmethod(lambda cls, device: HOPPER))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU without a table")
    monkeypatch.setattr(deep_gemm, "DeepGemm", lambda: LIBRARY)
    streams = {
        kind: fp8_of(create._build(kind, torch.device("cpu"))).products._experts
        for kind in (KernelSet.HOPPER, KernelSet.TRITON)
    }
    assert streams[KernelSet.HOPPER] is not None
    assert streams[KernelSet.TRITON] is None
