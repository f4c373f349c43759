"""Dependent launches as Triton compiles them, and, on a GPU, as a graph runs them.

What is compiled needs Triton and no GPU; not for its interpreter.
"""

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.formats.triton_gemm.limits import HOPPER
from engine.streams import Streams
from tests.engine.elsewhere import compiling_only
from tests.engine.triton_device import IS_INTERPRETED

triton = pytest.importorskip("triton")
dependent = importlib.import_module("engine.kernels.fused.dependent")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(IS_INTERPRETED, reason="compiles nothing"),
]

TOUCHES_MEMORY = re.compile(r"\b(ld|st|atom|red|cp\.async)\S*global")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Compile instead of launching, and keep what was compiled."""
    with compiling_only(monkeypatch, HOPPER.sm) as found:
        yield found


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def run_kernels() -> None:
    """One launch each of kernels of several shapes of code."""
    quant = importlib.import_module("engine.kernels.fused.quant")
    ops = {
        name: importlib.import_module(f"engine.ops.{name}_kernel")
        for name in ("norm", "activation", "permute", "gate", "masked")
    }
    rule = importlib.import_module("engine.ops.routing_rule").RoutingRule(
        top_k=2, n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0
    )
    ops["norm"].add_rms_norm_fp8(bf16(4, 256), bf16(4, 256), bf16(256), 1e-6, with_plain=True)
    ops["activation"].silu_and_mul_fp8(bf16(4, 512), torch.zeros(4, dtype=torch.int32))
    rows = quant.quantize_rows(bf16(4, 256))
    ids = torch.zeros(4, 2, dtype=torch.int64)
    places = ops["masked"].moe_align_masked(ids, 0, 2, 128)
    masked = ops["masked"].permute_masked_rows(rows, places)
    ops["masked"].masked_silu_and_mul_fp8(bf16(2, 128, 512), masked)
    ops["permute"].unpermute_rows(bf16(256, 256), places, torch.zeros(4, 2), None)
    ops["gate"].group_limited_topk(torch.zeros(4, 16), torch.zeros(16), rule)


def test_every_kernel_waits_before_it_touches_memory(compiled: list[Any]) -> None:
    with dependent.dependent_launches():
        run_kernels()
    assert len(compiled) >= 7
    for _, kernel in compiled:
        code = kernel.asm["ptx"]
        assert kernel.metadata.launch_pdl
        assert code.count("griddepcontrol.wait") == 1
        touched = TOUCHES_MEMORY.search(code)
        assert touched is not None
        assert code.index("griddepcontrol.wait") < touched.start()
        assert code.index("griddepcontrol.wait") < code.index("griddepcontrol.launch_dependents")


def test_otherwise_no_kernel_waits(compiled: list[Any]) -> None:
    run_kernels()
    assert not any("griddepcontrol" in kernel.asm["ptx"] for _, kernel in compiled)
    assert not any(kernel.metadata.launch_pdl for _, kernel in compiled)


def make_chain(rows: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Many short kernels, each of which reads what the one before has written."""
    norm = importlib.import_module("engine.ops.norm_kernel")
    activation = importlib.import_module("engine.ops.activation_kernel")

    def run() -> Tensor:
        x, delta = rows, None
        for _ in range(20):
            x, plain, _ = norm.add_rms_norm_fp8(x, delta, weight, 1e-6, with_plain=True)
            quantized = activation.silu_and_mul_fp8(plain)
            half = quantized.data_TK.bfloat16()
            delta = torch.cat((half, half), dim=1)
            x = x + 0.5 * delta
        return x

    return run


@NEEDS_GPU
def test_a_graph_of_dependent_launches_computes_the_same() -> None:
    torch.seed()
    capture = importlib.import_module("engine.graphs.capture").Capture(
        Streams(torch.device("cuda"))
    )
    rows = torch.randn(64, 7168, device="cuda").bfloat16()
    run = make_chain(rows, torch.rand(7168, device="cuda").bfloat16())
    outs: list[Tensor] = []

    def keep() -> None:
        outs[:] = [run()]

    plain, plain_out = capture.graph(keep), outs.copy()
    with dependent.dependent_launches():
        early, early_out = capture.graph(keep), outs.copy()
    for _ in range(50):
        rows.copy_(torch.randn_like(rows))
        plain.replay()
        expected = plain_out[0].clone()
        early.replay()
        early.replay()
        assert torch.equal(early_out[0], expected)
