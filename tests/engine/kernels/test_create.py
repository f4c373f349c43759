"""Which kernels a device gets, and what the log says about the others."""

import importlib.util
import logging
from collections.abc import Sequence

import pytest
import torch

from engine.formats import deep_gemm
from engine.formats.triton_gemm.limits import ADA, AMPERE, HOPPER, DeviceLimits
from engine.kernels import create
from engine.kernels.create import KernelSet, create_kernels
from engine.kernels.portable import portable_kernels
from engine.ops.op import Target
from runtime.errors import ConfigError

TURING = DeviceLimits(sm=75, shared_memory=64 * 1024, num_sms=40)
BLACKWELL = DeviceLimits(sm=100, shared_memory=227 * 1024, num_sms=148)


def test_a_cpu_gets_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        kernels = create_kernels("cpu")
    assert (kernels.name, kernels.ops.target) == ("portable", Target.PORTABLE)
    assert "name=portable device=cpu formats=none" in caplog.text
    assert "not triton: no CUDA device" in caplog.text


@pytest.mark.parametrize("kernels", [KernelSet.HOPPER, KernelSet.TRITON])
def test_what_does_not_run_there_cannot_be_forced(kernels: KernelSet) -> None:
    with pytest.raises(ConfigError, match=r"no CUDA device. Fix: portable"):
        create_kernels("cpu", kernels=kernels)


class FakeHost:
    """A machine with a GPU, as the choice sees it; building gives a CPU's kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.built: list[KernelSet] = []

    def set(
        self,
        limits: DeviceLimits,
        *,
        triton: bool = True,
        deep_gemm_works: bool = False,
        wheels: Sequence[str] = (),
    ) -> None:
        """Be a GPU of a kind, with these packages installed."""
        installed = {"triton": triton} | {name: name in wheels for name in ALL}
        find_spec = importlib.util.find_spec
        self._patch.setattr(DeviceLimits, "of", classmethod(lambda cls, device: limits))
        self._patch.setattr(deep_gemm, "is_available", lambda: deep_gemm_works)
        self._patch.setattr(
            importlib.util,
            "find_spec",
            lambda name: installed[name] or None if name in installed else find_spec(name),
        )
        self._patch.setattr(create, "_build", self._build)

    def _build(self, kind: KernelSet, device: torch.device) -> portable_kernels:
        self.built.append(kind)
        return portable_kernels()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    return FakeHost(monkeypatch)


ALL = ("deep_gemm", "flash_attn", "flash_attn.cute", "flash_mla")
PRODUCTS = "products by our Triton kernels, as deep_gemm is not installed"
PROMPTS = "attention of prompts by PyTorch, as flash_attn.cute is not installed"


@pytest.mark.parametrize(
    ("limits", "wheels", "said"),
    [
        (HOPPER, (), [PRODUCTS, PROMPTS, "attention of decode steps by plain PyTorch"]),
        (HOPPER, ("flash_attn",), [PRODUCTS, PROMPTS]),
        (HOPPER, ("deep_gemm", "flash_mla"), [PROMPTS]),
        (HOPPER, ALL, []),
        (BLACKWELL, (), [PROMPTS]),
        (BLACKWELL, ALL[1:3], []),
        (AMPERE, (), []),
    ],
)
def test_one_line_says_what_is_slower_for_want_of_a_library(
    host: FakeHost,
    caplog: pytest.LogCaptureFixture,
    limits: DeviceLimits,
    wheels: tuple[str, ...],
    said: list[str],
) -> None:
    host.set(limits, deep_gemm_works="deep_gemm" in wheels, wheels=wheels)
    with caplog.at_level(logging.WARNING):
        create_kernels("cuda")
    assert len(caplog.records) == bool(said)
    assert all(text in caplog.text for text in said)
    assert caplog.text.count("is not installed") >= len(said)
    assert ('Fix: pip install "tandem-serve[gpu]"' in caplog.text) == bool(said)
    is_other_heard = [text in caplog.text for text in (PRODUCTS, PROMPTS) if text not in said]
    assert not any(is_other_heard)


def test_a_cpu_is_told_of_no_library(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        create_kernels("cpu")
    assert not caplog.records


@pytest.mark.parametrize("limits", [AMPERE, ADA, HOPPER], ids=["ampere", "ada", "hopper"])
def test_a_gpu_without_deep_gemm_gets_triton(
    host: FakeHost, limits: DeviceLimits, caplog: pytest.LogCaptureFixture
) -> None:
    host.set(limits)
    with caplog.at_level(logging.INFO):
        create_kernels("cuda")
    assert host.built == [KernelSet.TRITON]
    assert "not hopper: no deep_gemm on a Hopper GPU" in caplog.text


def test_deep_gemm_comes_first_and_another_set_can_be_forced(host: FakeHost) -> None:
    host.set(HOPPER, deep_gemm_works=True)
    create_kernels("cuda")
    for kind in KernelSet:
        create_kernels("cuda", kernels=kind)
    assert host.built == [KernelSet.HOPPER, *KernelSet]


@pytest.mark.parametrize(
    ("host_is", "dtype", "reason"),
    [
        ((TURING, True), torch.bfloat16, "the GPU is sm75, older than sm80"),
        ((ADA, False), torch.bfloat16, "triton is not installed"),
        ((ADA, True), torch.float32, "activations in torch.float32, not bfloat16"),
    ],
)
def test_what_else_gets_the_reference(
    host: FakeHost,
    caplog: pytest.LogCaptureFixture,
    host_is: tuple[DeviceLimits, bool],
    dtype: torch.dtype,
    reason: str,
) -> None:
    limits, has_triton = host_is
    host.set(limits, triton=has_triton)
    with caplog.at_level(logging.INFO):
        create_kernels("cuda", dtype)
    assert host.built == [KernelSet.PORTABLE]
    assert reason in caplog.text
