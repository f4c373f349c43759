"""Choose the kernels of a device, once, by what it is and what is installed."""

import importlib
import importlib.util
import logging
from enum import StrEnum

import torch

from engine.kernels import deep_gemm, flash_attention, flash_mla
from engine.kernels.base import Kernels
from engine.kernels.expert_stream.tiles import MEASURED
from engine.kernels.portable import PortableKernels
from engine.kernels.triton_gemm.limits import DeviceLimits
from engine.kernels.triton_gemm.tables import find_table
from runtime.errors import ConfigError

MIN_SM = 80
"""Compute capability of the oldest GPUs that our Triton kernels run on (Ampere)."""

logger = logging.getLogger(__name__)


class KernelSet(StrEnum):
    """The sets of kernels there are."""

    HOPPER = "hopper"
    """DeepGEMM, FlashAttention-4, FlashMLA and our Triton kernels."""
    TRITON = "triton"
    """Our Triton kernels alone, products and decode's attention too, and PyTorch's for prompts."""
    PORTABLE = "portable"
    """Plain PyTorch."""


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
    created = _build(kernels, device)
    logger.info(
        "chose kernels name=%s device=%s fp8=%s%s",
        created.name, device, created.has_fp8,
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
    match kind:
        case KernelSet.HOPPER:
            return _build_hopper(device)
        case KernelSet.TRITON:
            return _build_triton(device)
        case KernelSet.PORTABLE:
            if device.type == "cuda":
                logger.warning("no fast kernels: the reference runs instead")
            return PortableKernels()


# Modules that need Triton are imported late: a machine without a GPU lacks it.


def _build_hopper(device: torch.device) -> Kernels:
    from engine.kernels.expert_stream.mlp import ExpertStream
    from engine.kernels.hopper import HopperKernels
    from engine.kernels.paged_mla.attention import PagedMLA

    attention = flash_attention.FlashAttention() if flash_attention.is_available() else None
    paged = flash_mla.FlashMLA() if flash_mla.is_available() else None
    if paged is None:
        logger.warning("decode attends by our own kernel: flash_mla is not installed")
    limits = DeviceLimits.of(device)
    return HopperKernels(
        gemm=deep_gemm.DeepGemm(),
        attention=attention,
        paged=paged,
        pages=PagedMLA(limits),
        experts=ExpertStream(MEASURED, limits.num_sms),
    )


def _build_triton(device: torch.device) -> Kernels:
    from engine.kernels.paged_mla.attention import PagedMLA
    from engine.kernels.torch_attention import TorchAttention
    from engine.kernels.triton_gemm.gemm import TritonGemm
    from engine.kernels.triton_kernels import TritonKernels

    name, version = torch.cuda.get_device_name(device), _triton_version()
    gemm = TritonGemm(DeviceLimits.of(device), find_table(name, version))
    has_flash = flash_attention.is_available()
    attention = flash_attention.FlashAttention() if has_flash else TorchAttention()
    return TritonKernels(gemm=gemm, attention=attention, pages=PagedMLA(gemm.limits))


def _triton_version() -> str:
    version: str = importlib.import_module("triton").__version__
    return version
