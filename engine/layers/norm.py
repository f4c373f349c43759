"""Root-mean-square norm, whole on every rank."""

from collections.abc import Iterator

from torch import Tensor, nn

from engine.kernels.fp8_rows import Activation
from engine.layers.context import LayerContext
from engine.weights.slices import WeightSlice


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, ctx: LayerContext, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self._kernels = ctx.kernels
        self.eps = eps
        self.weight = ctx.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to the same shape and dtype."""
        return self._kernels.rms_norm(x, self.weight, self.eps)

    def feed(self, x_TD: Tensor, *, fp8: bool) -> Activation:
        """Norm [T, size] for a product that takes FP8 rows, or one that does not."""
        if fp8:
            return self._kernels.rms_norm_fp8(x_TD, self.weight, self.eps)
        return self._kernels.rms_norm(x_TD, self.weight, self.eps)

    def add(self, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + delta and its norm, [T, size] each."""
        return self._kernels.add_rms_norm(x_TD, delta_TD, self.weight, self.eps)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """See `HoldsWeights`."""
        yield WeightSlice.whole(f"{prefix}.weight", self.weight)
