"""Choose the kernels of a device, once, by what it is and what is installed."""

import importlib
import importlib.util
import logging

import torch

from engine.kernels import deep_gemm, flash_attention, flash_mla
from engine.kernels.base import Kernels
from engine.kernels.portable import PortableKernels

logger = logging.getLogger(__name__)


def create_kernels(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Kernels:
    """Return the fastest set that runs on `device` with activations of `dtype`, and log it."""
    kernels = _create(torch.device(device), dtype)
    logger.info("chose kernels name=%s device=%s fp8=%s", kernels.name, device, kernels.has_fp8)
    return kernels


def _create(device: torch.device, dtype: torch.dtype) -> Kernels:
    if device.type != "cuda":
        return PortableKernels()
    if dtype != torch.bfloat16:
        logger.warning("fast kernels need bfloat16 dtype=%s", dtype)
        return PortableKernels()
    missing = [
        name
        for name, is_there in (
            ("triton", importlib.util.find_spec("triton") is not None),
            ("deep_gemm on a Hopper GPU", deep_gemm.is_available()),
        )
        if not is_there
    ]
    if missing:
        logger.warning("no fast kernels: the reference runs instead missing=%s", missing)
        return PortableKernels()
    # Imported late: the module needs Triton, which a machine without a GPU lacks.
    hopper = importlib.import_module("engine.kernels.hopper")
    attention = flash_attention.FlashAttention() if flash_attention.is_available() else None
    paged = flash_mla.FlashMLA() if flash_mla.is_available() else None
    if paged is None:
        logger.warning("decode attends slowly: flash_mla is not installed")
    kernels: Kernels = hopper.HopperKernels(
        gemm=deep_gemm.DeepGemm(), attention=attention, paged=paged
    )
    return kernels
