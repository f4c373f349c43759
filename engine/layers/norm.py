"""Root-mean-square norm, whole on every rank."""

from collections.abc import Iterator

from torch import Tensor, nn

from engine.kernels import reference
from engine.layers.context import LayerContext
from engine.weights.slices import WeightSlice


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, ctx: LayerContext, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = ctx.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to the same shape and dtype."""
        return reference.rms_norm(x, self.weight, self.eps)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """See `HoldsWeights`."""
        yield WeightSlice.whole(f"{prefix}.weight", self.weight)
