"""What the layers ask of a device: number formats, attention, and a table of other operations.

Chosen once, when the model is built (`engine.kernels.create`), and passed down the constructors; a
layer takes what it needs and never asks what it runs on.
"""

from dataclasses import dataclass
from enum import StrEnum

from engine.attention.kernels import AttentionKernels
from engine.formats.base import Formats
from engine.ops.op import Ops


class KernelSet(StrEnum):
    """The sets of kernels there are."""

    HOPPER = "hopper"
    """DeepGEMM, FlashAttention-4, FlashMLA and our Triton kernels."""
    TRITON = "triton"
    """Triton kernels for GEMMs and decode attention, PyTorch's attention for prompts."""
    PORTABLE = "portable"
    """Plain PyTorch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What runs on one device.

    Attributes:
        name: for the log.
        formats: in which weights and rows are multiplied.
        attention: for whoever attends.
        ops: all other operations.
    """

    name: str
    formats: Formats
    attention: AttentionKernels
    ops: Ops
