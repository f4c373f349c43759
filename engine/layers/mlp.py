"""The gated feed-forward network of dense layers and of shared experts, split over tp."""

from torch import Tensor, nn

from engine.kernels.fp8_rows import Activation
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); `reduce=False` leaves the sum over tp to the caller."""

    def __init__(
        self, ctx: LayerContext, hidden_size: int, intermediate_size: int, *, reduce: bool = True
    ) -> None:
        super().__init__()
        self._kernels = ctx.kernels
        self.gate_up_proj = ColumnParallelLinear(
            ctx, hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        )
        self.down_proj = RowParallelLinear(ctx, intermediate_size, hidden_size, reduce=reduce)

    @property
    def is_fp8(self) -> bool:
        """Whether an input is best given as `Fp8Rows`."""
        return self.gate_up_proj.is_fp8

    def forward(self, hidden: Activation) -> Tensor:
        """Map [T, D] to [T, D]."""
        gate_up: Tensor = self.gate_up_proj(hidden)
        activated: Activation
        if self.down_proj.is_fp8:
            activated = self._kernels.silu_and_mul_fp8(gate_up)
        else:
            activated = self._kernels.silu_and_mul(gate_up)
        out_TD: Tensor = self.down_proj(activated)
        return out_TD
