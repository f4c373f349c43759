"""The gated feed-forward network of dense layers and of shared experts, split over tp."""

from torch import Tensor, nn

from engine.formats.fp8_rows import Activation, Fp8Rows
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.norm import FeedFormat, Normed
from engine.operations import Operations
from engine.ops.activation import SILU_AND_MUL, SILU_AND_MUL_FP8


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Attributes:
        feed_format: of the rows that `forward` takes.
    """

    def __init__(self, ctx: LayerContext, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self._silu_and_mul = ctx.ops[SILU_AND_MUL]
        self._silu_and_mul_fp8 = ctx.ops[SILU_AND_MUL_FP8]
        self._sharding = ctx.sharding
        self.gate_up_proj = ColumnParallelLinear(
            ctx, hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        )
        self.down_proj = RowParallelLinear(ctx.within("down_proj"), intermediate_size, hidden_size)
        self.feed_format = FeedFormat.of(
            is_quantized=self.takes_quantized, is_sent=self._sharding.sends_rows
        )

    @property
    def takes_quantized(self) -> bool:
        """Whether an input is best given quantised."""
        return self.gate_up_proj.takes_quantized

    def forward(self, normed: Normed) -> Operations[Tensor]:
        """Map this rank's rows [t, D] to [t, D], complete."""
        gathering = self._sharding.start_gather_padded(normed.feed)
        yield
        reducing = self._sharding.start_reduce(self.partial(gathering.wait()))
        yield
        return reducing.wait()

    def choose(self, normed: Normed) -> Activation:
        """Return the rows that `partial` is best given."""
        return normed.feed if self.takes_quantized else normed.plain

    def partial(self, hidden: Activation) -> Tensor:
        """Map [T, D] to [T, D]: this rank's part of the sum over tp, without communication."""
        out_TD: Tensor = self.down_proj(self.activate(hidden))
        return out_TD

    def activate(self, hidden: Activation) -> Activation:
        """Map [T, D] to what `down_proj` takes: silu(gate) * up of this rank's columns."""
        if isinstance(hidden, Fp8Rows):
            hidden = hidden.column_major()
        gate_up: Tensor = self.gate_up_proj(hidden)
        if self.down_proj.takes_quantized:
            return self._silu_and_mul_fp8(gate_up)
        return self._silu_and_mul(gate_up)
