"""Choose what attends on a device, by its set of kernels and what is installed."""

import torch

from engine.attention import flash_attention, flash_mla
from engine.attention.attention_choice import AttentionChoice
from engine.attention.kernels import AttentionKernels
from engine.attention.reference_kernels import ReferenceAttention
from engine.formats.triton_gemm.limits import DeviceLimits
from engine.kernels.kernel_set import KernelSet


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
