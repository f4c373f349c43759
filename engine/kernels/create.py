"""Choose the kernels of a device, once, by what it is and what is installed."""

import importlib.util
import logging
from dataclasses import dataclass
from typing import Final

import torch

from engine.attention import flash_attention, flash_mla
from engine.attention.attention_choice import AttentionChoice
from engine.attention.kernels import AttentionKernels
from engine.attention.reference_kernels import ReferenceAttention
from engine.formats import deep_gemm
from engine.formats.registry import create_formats
from engine.formats.triton_gemm.limits import DeviceLimits
from engine.kernels.base import Kernels, KernelSet
from engine.kernels.portable import portable_kernels
from engine.ops.op import Target
from engine.ops.table import resolve_ops
from runtime.errors import ConfigError
from runtime.logging import fields

MIN_SM = 80
"""Compute capability of the oldest GPUs that our Triton kernels run on (Ampere)."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A library for some GPUs: what it does there, and what does it where the library is missing.

    It is for compute capabilities [least_sm, end_sm).
    """

    module: str
    least_sm: int
    end_sm: int
    work: str
    instead: str


WHEELS: Final = (
    Wheel("deep_gemm", 90, 100, "products", "our Triton kernels"),
    Wheel("flash_attn.cute", 90, 1000, "attention of prompts", "PyTorch"),
    Wheel("flash_mla", 90, 100, "attention of decode steps", "plain PyTorch over whole tables"),
)

logger = logging.getLogger(__name__)


def create_kernels(
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    kernels: KernelSet | None = None,
) -> Kernels:
    """Return the fastest set that runs on `device` with activations of `dtype`, and log it.

    Args:
        device: that the model lies on.
        dtype: of activations.
        kernels: takes the choice away, for tests and comparisons.

    Raises:
        ConfigError: the set that is asked for does not run there.
    """
    device = torch.device(device)
    reasons = {kind: _missing(kind, device, dtype) for kind in KernelSet}
    if kernels is None:
        kernels = next(kind for kind in KernelSet if not reasons[kind])
    elif reasons[kernels]:
        fitting = [kind for kind in KernelSet if not reasons[kind]]
        raise ConfigError("kernels", kernels, reasons[kernels], ", ".join(fitting))
    if kernels is not KernelSet.PORTABLE:
        _warn_of_missing_wheels(DeviceLimits.of(device).sm)
    created = _build(kernels, device)
    logger.info(
        "chose kernels %s%s",
        fields(name=created.name, device=device, formats=created.formats.describe()),
        "".join(f" not {kind}: {reason};" for kind, reason in reasons.items() if reason),
    )  # fmt: skip
    return created


def _missing(kind: KernelSet, device: torch.device, dtype: torch.dtype) -> str:
    """Return why the set does not run there, or nothing."""
    if kind is KernelSet.PORTABLE:
        return ""
    if device.type != "cuda":
        return "no CUDA device"
    if dtype != torch.bfloat16:
        return f"activations in {dtype}, not bfloat16"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if kind is KernelSet.HOPPER:
        return "" if deep_gemm.is_available() else "no deep_gemm on a Hopper GPU"
    sm = DeviceLimits.of(device).sm
    return "" if sm >= MIN_SM else f"the GPU is sm{sm}, older than sm{MIN_SM}"


def _build(kind: KernelSet, device: torch.device) -> Kernels:
    if kind is KernelSet.PORTABLE:
        if device.type == "cuda":
            logger.warning("no fast kernels: the reference runs instead")
        return portable_kernels(formats=create_formats(kind, device))
    limits = DeviceLimits.of(device)
    return Kernels(
        name="hopper" if kind is KernelSet.HOPPER else f"triton on sm{limits.sm}",
        formats=create_formats(kind, device),
        attention=create_attention(kind, device),
        ops=resolve_ops(choose_target(kind, limits)),
    )


def create_attention(kernels: KernelSet, device: torch.device) -> AttentionKernels:
    """Return the attention of a set of kernels, on a device."""
    if kernels is KernelSet.PORTABLE:
        return ReferenceAttention()
    # Late: a machine without a GPU lacks Triton.
    from engine.attention.gpu_kernels import GpuAttention
    from engine.attention.paged_mla.attention import PagedMLA

    is_hopper = kernels is KernelSet.HOPPER
    return GpuAttention(
        heads=choose_heads(),
        pages=PagedMLA(DeviceLimits.of(device)),
        flash_mla=flash_mla.FlashMLA() if is_hopper and flash_mla.is_available() else None,
        fuses_absorption=is_hopper,
    )


def choose_heads() -> AttentionChoice:
    """Return attention of decompressed heads: the fastest that is installed, and one for all."""
    from engine.attention.torch_attention import TorchAttention  # late: CPUs have no use for it

    fastest = [flash_attention.FlashAttention()] if flash_attention.is_available() else []
    return AttentionChoice(*fastest, TorchAttention())


def choose_target(kind: KernelSet, limits: DeviceLimits) -> Target:
    """Return what operations are chosen for, with a set of kernels on a GPU."""
    if kind is KernelSet.TRITON:
        return Target.TRITON if limits.has_fp8 else Target.NO_E4M3
    return Target.HOPPER if kind is KernelSet.HOPPER else Target.PORTABLE


def _warn_of_missing_wheels(sm: int) -> None:
    """Say in one line which libraries this GPU could use and has not, and what runs instead."""
    missing = [
        f"{wheel.work} by {wheel.instead}, as {wheel.module} is not installed"
        for wheel in WHEELS
        if wheel.least_sm <= sm < wheel.end_sm and not _is_installed(wheel.module)
    ]
    if missing:
        logger.warning(
            'this GPU could be faster: %s. Fix: pip install "tandem-serve[gpu]"', "; ".join(missing)
        )


def _is_installed(module: str) -> bool:
    package, _, rest = module.partition(".")
    if importlib.util.find_spec(package) is None:
        return False
    return not rest or importlib.util.find_spec(module) is not None
