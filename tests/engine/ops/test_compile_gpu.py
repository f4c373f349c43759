"""Every kernel of the table compiles for GPUs that are not here.

Needs Triton and no GPU, as the tests of tiles in `tests/engine/formats/triton_gemm` do.
"""

import importlib
from collections.abc import Iterator

import pytest
import torch

from engine.formats.triton_gemm.limits import ADA, AMPERE, HOPPER, DeviceLimits
from engine.ops.op import Target
from engine.ops.table import OPS, resolve_ops
from tests.engine.elsewhere import compiling_only
from tests.engine.ops.examples import EXAMPLES, Draw
from tests.engine.triton_device import IS_INTERPRETED

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.fixture
def driver() -> Iterator[None]:
    pytest.importorskip("triton")
    if IS_INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    yield
    if torch.cuda.is_available():
        importlib.import_module("triton.runtime.driver").driver.reset_active()


@pytest.mark.parametrize(
    ("target", "limits"),
    [(Target.NO_E4M3, AMPERE), (Target.TRITON, ADA), (Target.HOPPER, HOPPER)],
)
@pytest.mark.usefixtures("driver")
def test_every_operation_compiles(
    target: Target, limits: DeviceLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, compiled = resolve_ops(target), dict[str, int]()
    with compiling_only(monkeypatch, limits.sm) as found:
        for op in OPS:
            before = len(found)
            args, kwargs = EXAMPLES[op].draw(Draw(0, torch.device("cpu"), torch.float32))
            ops[op](*args, **kwargs)
            compiled[op.name] = len(found) - before
    assert all(kernel is not None for _, kernel in found)
    # The score of few tokens is a kernel for numbers of the type that the weight is served in.
    without = {op.name for op in OPS if not op.kernels} | {"gate_logits"}
    assert {name for name, number in compiled.items() if not number} == without


@pytest.mark.usefixtures("driver")
def test_few_tokens_are_scored_in_parts_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    (op,) = (op for op in OPS if op.name == "gate_logits")
    args, kwargs = EXAMPLES[op].draw(Draw(0, torch.device("cpu"), torch.bfloat16))
    with compiling_only(monkeypatch, HOPPER.sm) as found:
        assert resolve_ops(Target.HOPPER)[op](*args, **kwargs).dim() == 3
    assert [name for name, _ in found] == ["_score"]
