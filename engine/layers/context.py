"""What every layer needs to know to be built: its numbers' type, its device, its ranks.

Passed down the constructors, so that no layer reads a global.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from engine.parallel.groups import ProcessGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """Compute dtype, device, and the process groups of this rank."""

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    groups: ProcessGroups = field(default_factory=ProcessGroups)

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return uninitialised memory for a weight; a loader fills it. `dtype` overrides."""
        empty = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(empty, requires_grad=False)
