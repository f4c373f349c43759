"""The names of the sets of kernels."""

from enum import StrEnum


class KernelSet(StrEnum):
    """The sets of kernels there are."""

    HOPPER = "hopper"
    """DeepGEMM, FlashAttention-4, FlashMLA and our Triton kernels."""
    TRITON = "triton"
    """Our Triton kernels alone, products and decode's attention too, and PyTorch's for prompts."""
    PORTABLE = "portable"
    """Plain PyTorch."""
