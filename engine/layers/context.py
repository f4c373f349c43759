"""What every layer needs to know to be built: its numbers' type, its device, its ranks, its
kernels.

Passed down the constructors, so that no layer reads a global.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from engine.kernels.base import Kernels
from engine.kernels.portable import PortableKernels
from engine.parallel.groups import ProcessGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """Compute dtype, device, process groups and kernels of this rank.

    Attributes:
        fp8: whether weights that the checkpoint quantises stay in FP8.
    """

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    groups: ProcessGroups = field(default_factory=ProcessGroups)
    kernels: Kernels = field(default_factory=PortableKernels)
    fp8: bool = False

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return uninitialised memory for a weight; a loader fills it. `dtype` overrides."""
        empty = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(empty, requires_grad=False)
