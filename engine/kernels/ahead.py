"""Operations that hasten others: they compute nothing, and may as well do nothing."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from engine.kernels import deep_gemm
from engine.kernels.weight_chunks import WeightChunks


class AheadKernels(Protocol):
    """What a device can begin early."""

    def dependent_launches(self) -> AbstractContextManager[None]:
        """Bring kernels onto the device early that this thread launches in the block."""
        ...

    def prefetch(self, chunks: WeightChunks) -> None:
        """Ask for memory that will be read soon, and do not wait for it."""
        ...


class NothingAhead:
    """A device of which nothing is asked: see `AheadKernels`."""

    def dependent_launches(self) -> AbstractContextManager[None]:
        """See `AheadKernels`."""
        return nullcontext()

    def prefetch(self, chunks: WeightChunks) -> None:
        """See `AheadKernels`."""


def create_ahead_kernels(device: torch.device) -> AheadKernels:
    """Return what the device can do."""
    if device.type != "cuda" or not deep_gemm.is_available():
        return NothingAhead()
    from engine.kernels.fused.ahead import HopperAhead  # needs Triton

    return HopperAhead()
