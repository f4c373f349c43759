"""Every operation on every target against its reference, and with the reference's signature.

On a GPU or in Triton's interpreter; see `test_fused_gpu` for how that is run.
"""

import inspect

import pytest
import torch

from engine.formats.triton_gemm.limits import DeviceLimits
from engine.ops.op import AnyOp, Target
from engine.ops.table import OPS, resolve_ops
from tests.engine.ops.examples import EXAMPLES, Draw
from tests.engine.relative_error import relative_error
from tests.engine.triton_device import DEVICE, IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]

TARGETS = [Target.TRITON, Target.HOPPER, Target.NO_E4M3]
PRODUCTS = torch.float32 if IS_INTERPRETED else torch.bfloat16
TOLERANCE = 0.15 if IS_INTERPRETED else 4e-2
"""Relative error of e4m3 and bfloat16; the interpreter cuts to them where a GPU rounds."""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_kernel_computes_what_its_reference_does(op: AnyOp, target: Target) -> None:
    if not IS_INTERPRETED and target is not Target.NO_E4M3 and not DeviceLimits.of(DEVICE).has_fp8:
        pytest.skip("this GPU has no FP8")
    example, seed = EXAMPLES[op], int(torch.randint(2**31, ()))
    actual, expected = (
        example.outcome(call, Draw(seed, DEVICE, PRODUCTS))
        for call in (resolve_ops(target)[op], op.reference)
    )
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        if example.is_exact or not other.is_floating_point():
            assert torch.equal(one, other)
        else:
            assert relative_error(one, other) < TOLERANCE


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_kernels_take_what_their_reference_takes(op: AnyOp, target: Target) -> None:
    wanted = inspect.signature(op.reference).parameters
    found = inspect.signature(resolve_ops(target)[op]).parameters
    assert [*found][: len(wanted)] == [*wanted]
    for name, parameter in found.items():
        if name in wanted:
            assert parameter.default == wanted[name].default
            assert parameter.kind == wanted[name].kind
        else:
            assert parameter.default is not inspect.Parameter.empty, "of those who know it alone"
