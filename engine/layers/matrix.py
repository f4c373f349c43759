"""A weight matrix in one of two formats: the compute dtype, or e4m3 with a scale per block.

The format follows from the kernels and the shape, once, at construction; whoever multiplies or
loads does not ask. The key idea: an FP8 weight keeps the checkpoint's bytes, so nothing is lost or
grown at load, and its input is quantised on the way in, unless it comes quantised already.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.formats.fp8_rows import GROUP, Activation, Fp8Rows
from engine.hf_config.quantization import UNQUANTIZED
from engine.layers.context import LayerContext
from engine.weights.fp8 import dequantize_block, scale_shape
from engine.weights.slices import WeightSlice


class Matrix(nn.Module):
    """[rows, columns], or a stack of them.

    Attributes:
        weight: [..., N, K].
        scale: [..., ceil(N / 128), ceil(K / 128)] float32, or None in the compute dtype.
        plain_because: why it is in the compute dtype although the checkpoint may have it in FP8,
            and the kernels could use it so; empty if that is not so.
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
            ctx: says whether weights are FP8.
            parts: rows of the checkpoint tensors that lie one below the other here.
            columns: K.
            stack: leading dimensions.
            quantized: false for a weight that checkpoints never quantise.
            whole_blocks: whether the last part too has to end on a block of scales.
            names: of the checkpoint's modules that lie here.
        """
        super().__init__()
        rows, inner = sum(parts), parts if whole_blocks else parts[:-1]
        self._ctx = ctx
        self.scale: nn.Parameter | None = None
        self.plain_because = ""
        if ctx.fp8 and quantized:
            named = next((name for name in names if ctx.unquantized.match(name)), "")
            if named:
                self.plain_because = f"{UNQUANTIZED} names {named.rpartition('.')[2]}"
            elif columns % GROUP or any(part % GROUP for part in inner):
                shares = " + ".join(map(str, parts))
                self.plain_because = f"{shares} rows x {columns} columns are not blocks of {GROUP}"
        if ctx.fp8 and quantized and not self.plain_because:
            self.weight = ctx.parameter(*stack, rows, columns, dtype=torch.float8_e4m3fn)
            shape = (*stack, *scale_shape(rows, columns))
            self.scale = ctx.parameter(*shape, dtype=torch.float32)
        else:
            self.weight = ctx.parameter(*stack, rows, columns)

    @property
    def is_fp8(self) -> bool:
        """Whether the weight is held in FP8, and an input is best given as `Fp8Rows`."""
        return self.scale is not None

    def forward(self, x: Activation) -> Tensor:
        """Map [..., K] to [..., N] (with FP8: [T, K] to [T, N])."""
        if self.scale is None:
            assert isinstance(x, Tensor)
            return F.linear(x, self.weight)
        kernels = self._ctx.kernels
        rows = x if isinstance(x, Fp8Rows) else kernels.quantize_rows(x)
        return kernels.fp8_linear(rows, self.weight, self.scale)

    def quantized_pair(self, index: int | None = None) -> tuple[Tensor, Tensor]:
        """Return (e4m3, scales) of an FP8 matrix."""
        assert self.scale is not None
        return (
            (self.weight, self.scale) if index is None else (self.weight[index], self.scale[index])
        )

    def dequantized(self) -> Tensor:
        """Return [N, K] in the compute dtype: the weight itself, or a copy if it is FP8."""
        if self.scale is None:
            return self.weight
        return dequantize_block(self.weight, self.scale).to(self._ctx.dtype)

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
        scale = None
        if self.scale is not None:
            scale = self.scale[index][row // GROUP : -(-(row + num_rows) // GROUP)]
        return WeightSlice(
            name=name,
            full_shape=full_shape,
            ranges=ranges,
            destination=self.weight[index][row : row + num_rows],
            scale=scale,
        )
