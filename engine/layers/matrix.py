"""A weight matrix in a number format: that of the model, or the plain one.

Which of the two follows from the checkpoint and the shape, once, at construction; whoever
multiplies or loads does not ask. The key idea: a quantised weight is kept as its format stores it,
and its input is quantised on the way in, unless it comes quantised already.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from engine.formats.fp8_rows import Activation
from engine.formats.stored_weight import StoredWeight
from engine.hf_config.quantization import UNQUANTIZED
from engine.layers.context import LayerContext
from engine.weights.slices import WeightSlice


class Matrix(nn.Module):
    """[rows, columns], or a stack of them.

    Attributes:
        weight: [..., N, K].
        scale: float32, as the format lays scales out, or None.
        number_format: of the weight.
        plain_because: why it is plain although the checkpoint may have it quantised, and the model
            has a format for that; empty if that is not so.
    """

    def __init__(
        self,
        ctx: LayerContext,
        parts: Sequence[int],
        columns: int,
        *,
        stack: tuple[int, ...] = (),
        quantized: bool = True,
        whole_blocks: bool = False,
        names: Iterable[str] = (),
    ) -> None:
        """Allocate.

        Args:
            ctx: says which format quantised weights have.
            parts: rows of the checkpoint tensors that lie one below the other here.
            columns: K.
            stack: leading dimensions.
            quantized: false for a weight that checkpoints never quantise.
            whole_blocks: whether the last part too has to end on a block of scales.
            names: of the checkpoint's modules that lie here.
        """
        super().__init__()
        rows = sum(parts)
        self._ctx = ctx
        self.number_format = ctx.number_format if quantized else ctx.kernels.formats.plain
        self.plain_because = ""
        if self.number_format.is_quantized:
            named = next((name for name in names if ctx.unquantized.match(name)), "")
            if named:
                self.plain_because = f"{UNQUANTIZED} names {named.rpartition('.')[2]}"
            else:
                layout = self.number_format.weights
                self.plain_because = layout.why_not(parts, columns, whole=whole_blocks)
        if self.plain_because:
            self.number_format = ctx.kernels.formats.plain
        dtype, scale_shape = self.number_format.weights.storage(rows, columns)
        self.weight = ctx.parameter(*stack, rows, columns, dtype=dtype)
        self.scale: nn.Parameter | None = None
        if scale_shape is not None:
            self.scale = ctx.parameter(*stack, *scale_shape, dtype=torch.float32)

    @property
    def takes_quantized(self) -> bool:
        """Whether an input is best given as the format quantises rows."""
        return self.number_format.rows is not None

    @property
    def stored(self) -> StoredWeight:
        """The weight as its format keeps it."""
        return StoredWeight(self.weight, self.scale)

    def forward(self, x: Activation) -> Tensor:
        """Map [..., K] to [..., N] (with a format that quantises rows: [T, K] to [T, N])."""
        codec = self.number_format.rows
        if codec is not None and isinstance(x, Tensor):
            x = codec.quantize_rows(x)
        return self.number_format.linear(x, self.stored)

    def dequantized(self) -> Tensor:
        """Return [N, K] in the compute dtype: the weight itself, or a copy if it is quantised."""
        return self.number_format.weights.dequantize(self.stored).to(self._ctx.dtype)

    def slice(
        self,
        name: str,
        full_shape: tuple[int, int],
        ranges: tuple[tuple[int, int], ...],
        *,
        row: int = 0,
        index: tuple[int, ...] = (),
    ) -> WeightSlice:
        """Return the load plan of one checkpoint tensor.

        Args:
            name: of the tensor.
            full_shape: that it has.
            ranges: rows and columns of it that go here.
            row: where they begin.
            index: place in the stack.
        """
        num_rows = ranges[0][1] - ranges[0][0]
        layout, scale = self.number_format.weights, None
        if self.scale is not None:
            scale = self.scale[index][layout.scale_rows(row, num_rows)]
        return WeightSlice(
            name=name,
            full_shape=full_shape,
            ranges=ranges,
            destination=self.weight[index][row : row + num_rows],
            scale=scale,
            rule=layout,
        )
