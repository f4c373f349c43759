"""What every layer needs to know to be built: its numbers' type, its device, its ranks, its
kernels.

Passed down the constructors, so that no layer reads a global.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from engine.formats.base import NumberFormat
from engine.formats.plain import PLAIN
from engine.hf_config.quantization import ModulePatterns
from engine.kernels.base import Kernels
from engine.kernels.portable import portable_kernels
from engine.ops.op import Ops
from engine.parallel.groups import ProcessGroups
from engine.parallel.token_sharding import ReplicatedTokens, ScatteredTokens, TokenSharding
from engine.side_stream import SideRule, SideStream


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """Compute dtype, device, process groups and kernels of this rank.

    Attributes:
        path: of the module that is built with it, as the checkpoint names modules.
        number_format: of the weights that the checkpoint quantises.
        unquantized: modules that it does not quantise.
        scatter_tokens: whether the tp ranks keep shares of the hidden states, not all of them.
        overlap_shared_expert: whether it runs while tokens travel to the routed experts.
        side_stream: that the shared expert runs on; None for the stream of all else.
        side_rule: in which steps, and how.
    """

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    groups: ProcessGroups = field(default_factory=ProcessGroups)
    kernels: Kernels = field(default_factory=portable_kernels)
    path: str = ""
    number_format: NumberFormat = PLAIN
    unquantized: ModulePatterns = field(default_factory=lambda: ModulePatterns(()))
    scatter_tokens: bool = False
    overlap_shared_expert: bool = True
    side_stream: SideStream | None = None
    side_rule: SideRule = field(default_factory=SideRule)

    @property
    def ops(self) -> Ops:
        """The table of operations; a layer takes what it calls when it is built."""
        return self.kernels.ops

    @property
    def sharding(self) -> TokenSharding:
        """How the residual stream lies on the ranks."""
        if self.scatter_tokens:
            return ScatteredTokens(self.groups.tp_group)
        return ReplicatedTokens(self.groups.tp_group)

    @property
    def unsplit(self) -> "LayerContext":
        """For a layer that a rank runs whole, on whatever rows it is given."""
        return replace(self, groups=ProcessGroups(), scatter_tokens=False)

    def within(self, name: str) -> "LayerContext":
        """For a part of the module that this is for."""
        return replace(self, path=f"{self.path}.{name}" if self.path else name)

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return uninitialised memory for a weight; a loader fills it. `dtype` overrides."""
        empty = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(empty, requires_grad=False)
