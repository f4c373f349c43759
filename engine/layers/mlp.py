"""The gated feed-forward network of dense layers and of shared experts, split over tp."""

from torch import Tensor, nn

from engine.kernels import reference
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); `reduce=False` leaves the sum over tp to the caller."""

    def __init__(
        self, ctx: LayerContext, hidden_size: int, intermediate_size: int, *, reduce: bool = True
    ) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(
            ctx, hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        )
        self.down_proj = RowParallelLinear(ctx, intermediate_size, hidden_size, reduce=reduce)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """Map [T, D] to [T, D]."""
        out_TD: Tensor = self.down_proj(reference.silu_and_mul(self.gate_up_proj(hidden_TD)))
        return out_TD
