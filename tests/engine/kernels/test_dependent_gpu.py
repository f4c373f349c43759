"""Dependent launches as Triton compiles them, and, on a GPU, as a graph runs them.

What is compiled needs Triton and no GPU; not for its interpreter.
"""

import importlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
dependent = importlib.import_module("engine.kernels.fused.dependent")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles nothing"),
]

TOUCHES_MEMORY = re.compile(r"\b(ld|st|atom|red|cp\.async)\S*global")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Hopper:
    """A driver that only says what it would run on."""

    def get_current_device(self) -> int:
        return 90

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Compile instead of launching, and keep what was compiled."""
    driver = importlib.import_module("triton.runtime.driver").driver
    jit = importlib.import_module("triton.runtime.jit").JITFunction
    launcher = importlib.import_module("engine.kernels.fused.launch").Launcher
    run, found = jit.run, list[Any]()

    def compile_only(self: Any, *arguments: Any, **options: Any) -> None:
        found.append(run(self, *arguments, **{**options, "warmup": True}))

    monkeypatch.setattr(jit, "run", compile_only)
    monkeypatch.setattr(launcher, "_remember", lambda *_: None)
    driver.set_active(Hopper())
    yield found
    if torch.cuda.is_available():
        driver.reset_active()


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def run_kernels() -> None:
    """One launch each of kernels of several shapes of code."""
    fused = {
        name: importlib.import_module(f"engine.kernels.fused.{name}")
        for name in ("norm", "quant", "permute", "routing", "masked")
    }
    rule = importlib.import_module("engine.kernels.routing").RoutingRule(
        top_k=2, n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0
    )
    fused["norm"].add_rms_norm_fp8(bf16(4, 256), bf16(4, 256), bf16(256), 1e-6, with_plain=True)
    fused["quant"].silu_and_mul_fp8(bf16(4, 512), torch.zeros(4, dtype=torch.int32))
    rows = fused["quant"].quantize_rows(bf16(4, 256))
    ids = torch.zeros(4, 2, dtype=torch.int64)
    places = fused["masked"].mask_to_experts(ids, 0, 2, 128)
    masked = fused["masked"].spread_masked_rows(rows, places)
    fused["masked"].masked_silu_and_mul_fp8(bf16(2, 128, 512), masked)
    fused["permute"].gather_rows(bf16(256, 256), places, torch.zeros(4, 2), None)
    fused["routing"].group_limited_topk(torch.zeros(4, 16), torch.zeros(16), rule)


def test_every_kernel_waits_before_it_touches_memory(compiled: list[Any]) -> None:
    with dependent.dependent_launches():
        run_kernels()
    assert len(compiled) >= 7
    for kernel in compiled:
        code = kernel.asm["ptx"]
        assert kernel.metadata.launch_pdl
        assert code.count("griddepcontrol.wait") == 1
        touched = TOUCHES_MEMORY.search(code)
        assert touched is not None
        assert code.index("griddepcontrol.wait") < touched.start()
        assert code.index("griddepcontrol.wait") < code.index("griddepcontrol.launch_dependents")


def test_otherwise_no_kernel_waits(compiled: list[Any]) -> None:
    run_kernels()
    assert not any("griddepcontrol" in kernel.asm["ptx"] for kernel in compiled)
    assert not any(kernel.metadata.launch_pdl for kernel in compiled)


@pytest.mark.parametrize("keep", [False, True])
def test_a_prefetch_asks_first_and_waits_afterwards(compiled: list[Any], keep: bool) -> None:
    module = importlib.import_module("engine.kernels.fused.prefetch")
    chunks = importlib.import_module("engine.kernels.weight_chunks").WeightChunks(
        addresses_N=torch.zeros(100, dtype=torch.int64), chunk_bytes=8192
    )
    module.prefetch(chunks, keep=keep)
    with dependent.dependent_launches():
        module.prefetch(chunks, keep=keep)
    plain, waiting = (kernel.asm["ptx"] for kernel in compiled)
    for code in (plain, waiting):
        assert code.count("cp.async.bulk.prefetch.L2") == 1
        assert ("evict_last" in code) is keep
    assert "griddepcontrol" not in plain
    order = [waiting.index(what) for what in ("launch_dependents", "bulk.prefetch", "rol.wait")]
    assert order == sorted(order)


def make_chain(rows: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Many short kernels, each of which reads what the one before has written."""
    norm = importlib.import_module("engine.kernels.fused.norm")
    quant = importlib.import_module("engine.kernels.fused.quant")

    def run() -> Tensor:
        x, delta = rows, None
        for _ in range(20):
            x, plain, _ = norm.add_rms_norm_fp8(x, delta, weight, 1e-6, with_plain=True)
            quantized = quant.silu_and_mul_fp8(plain)
            half = quantized.data_TK.bfloat16()
            delta = torch.cat((half, half), dim=1)
            x = x + 0.5 * delta
        return x

    return run


@NEEDS_GPU
def test_a_graph_of_dependent_launches_computes_the_same() -> None:
    torch.seed()
    capture = importlib.import_module("engine.graphs.capture").Capture(torch.device("cuda"))
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


@NEEDS_GPU
def test_asking_for_memory_leaves_it_unchanged() -> None:
    """To the last chunk; that it is faster to read then, a benchmark says."""
    prefetch = importlib.import_module("engine.kernels.fused.prefetch").prefetch
    first_chunks = importlib.import_module("engine.kernels.weight_chunks").first_chunks
    weights = [torch.randn(size, device="cuda") for size in (1 << 20, 5000, 3)]
    before = [weight.clone() for weight in weights]
    for chunk_bytes in (16, 4096, 65536):
        chunks = first_chunks(weights, 1 << 30, chunk_bytes)
        assert chunks is not None
        for keep in (False, True):
            prefetch(chunks, keep=keep, max_programs=7)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
