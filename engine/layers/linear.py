"""Matrix products, whole or split over the tp axis.

Column-parallel splits outputs and needs no communication; row-parallel splits inputs and leaves on
each rank a part of a sum, which whoever keeps the hidden states adds up (`TokenSharding`). Put one
after the other, a pair costs one reduction. A layer may fuse several
checkpoint tensors that share an input (gate and up): `outputs` names them, in order, and they are
looked up beside the layer's own name. With one rank all of this is a plain linear layer.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from engine.formats.fp8_rows import Activation
from engine.layers.context import LayerContext
from engine.layers.matrix import Matrix
from engine.weights.slices import WeightSlice, split_evenly


def sibling(prefix: str, name: str) -> str:
    """Return the weight name of `name`, a tensor beside the module `prefix`."""
    parent = prefix.rpartition(".")[0]
    return f"{parent}.{name}.weight" if parent else f"{name}.weight"


class ColumnParallelLinear(nn.Module):
    """A product of which each tp rank computes an equal share of every named output.

    With an unsplit context it is the same product on every rank.
    """

    def __init__(
        self,
        ctx: LayerContext,
        in_features: int,
        outputs: Mapping[str, int],
        *,
        quantized: bool = True,
    ) -> None:
        """Allocate.

        Args:
            ctx: of the module whose parts the outputs are.
            in_features: K.
            outputs: rows by name.
            quantized: false for a weight that checkpoints never quantise.
        """
        super().__init__()
        self._group = ctx.groups.tp_group
        self.in_features = in_features
        self.outputs = dict(outputs)
        shares = [size // self._group.size for size in outputs.values()]
        self.matrix = Matrix(
            ctx,
            shares,
            in_features,
            quantized=quantized,
            # A share that begins inside a block of scales cannot keep the checkpoint's numbers.
            whole_blocks=self._group.size > 1,
            names=[ctx.within(name).path for name in outputs],
        )

    @property
    def weight(self) -> Tensor:
        """[sum of outputs / tp, in_features]."""
        return self.matrix.weight

    @property
    def takes_quantized(self) -> bool:
        """Whether an input is best given quantised."""
        return self.matrix.takes_quantized

    def forward(self, x: Activation) -> Tensor:
        """Map [..., in_features] to [..., sum of outputs / tp]: this rank's share of each."""
        out: Tensor = self.matrix(x)
        return out

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """See `HoldsWeights`."""
        row = 0
        for name, size in self.outputs.items():
            start, end = split_evenly(size, self._group.rank, self._group.size)
            yield self.matrix.slice(
                sibling(prefix, name),
                (size, self.in_features),
                ((start, end), (0, self.in_features)),
                row=row,
            )
            row += end - start


class RowParallelLinear(nn.Module):
    """A product whose input is split over the tp ranks, as a column-parallel layer leaves it."""

    def __init__(self, ctx: LayerContext, in_features: int, out_features: int) -> None:
        """Allocate; `ctx` is that of this product itself."""
        super().__init__()
        self._group = ctx.groups.tp_group
        self.in_features, self.out_features = in_features, out_features
        share = in_features // self._group.size
        self.matrix = Matrix(ctx, [out_features], share, names=[ctx.path])

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features / tp]."""
        return self.matrix.weight

    @property
    def takes_quantized(self) -> bool:
        """Whether an input is best given quantised."""
        return self.matrix.takes_quantized

    def forward(self, x: Activation) -> Tensor:
        """Map [..., in_features / tp] to [..., out_features]: this rank's part of the sum."""
        out: Tensor = self.matrix(x)
        return out

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """See `HoldsWeights`."""
        columns = split_evenly(self.in_features, self._group.rank, self._group.size)
        yield self.matrix.slice(
            f"{prefix}.weight",
            (self.out_features, self.in_features),
            ((0, self.out_features), columns),
        )
