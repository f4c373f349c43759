"""Matrix products, whole or split over the tp axis.

Column-parallel splits outputs and needs no communication; row-parallel splits inputs and ends in an
all-reduce; put one after the other, a pair costs one all-reduce. A layer may fuse several
checkpoint tensors that share an input (gate and up): `outputs` names them, in order, and they are
looked up beside the layer's own name. With one rank all of this is a plain linear layer.
"""

from collections.abc import Iterator, Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.context import LayerContext
from engine.weights.slices import WeightSlice, split_evenly


def sibling(prefix: str, name: str) -> str:
    """Return the weight name of `name`, a tensor beside the module `prefix`."""
    parent = prefix.rpartition(".")[0]
    return f"{parent}.{name}.weight" if parent else f"{name}.weight"


class ReplicatedLinear(nn.Module):
    """The same product on every rank."""

    def __init__(self, ctx: LayerContext, in_features: int, outputs: Mapping[str, int]) -> None:
        super().__init__()
        self.outputs = dict(outputs)
        self.weight = ctx.parameter(sum(outputs.values()), in_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., sum of outputs]."""
        return F.linear(x, self.weight)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """See `HoldsWeights`."""
        parts = self.weight.split_with_sizes(list(self.outputs.values()))
        for name, part in zip(self.outputs, parts, strict=True):
            yield WeightSlice.whole(sibling(prefix, name), part)


class ColumnParallelLinear(nn.Module):
    """A product of which each tp rank computes an equal share of every named output."""

    def __init__(self, ctx: LayerContext, in_features: int, outputs: Mapping[str, int]) -> None:
        super().__init__()
        self._group = ctx.groups.tp_group
        self.in_features = in_features
        self.outputs = dict(outputs)
        self.weight = ctx.parameter(sum(outputs.values()) // self._group.size, in_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., sum of outputs / tp]: this rank's share of each."""
        return F.linear(x, self.weight)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """See `HoldsWeights`."""
        row = 0
        for name, size in self.outputs.items():
            start, end = split_evenly(size, self._group.rank, self._group.size)
            yield WeightSlice(
                name=sibling(prefix, name),
                full_shape=(size, self.in_features),
                ranges=((start, end), (0, self.in_features)),
                destination=self.weight[row : row + end - start],
            )
            row += end - start


class RowParallelLinear(nn.Module):
    """A product whose input is split over the tp ranks, as a column-parallel layer leaves it."""

    def __init__(
        self, ctx: LayerContext, in_features: int, out_features: int, *, reduce: bool = True
    ) -> None:
        super().__init__()
        self._group = ctx.groups.tp_group
        self._reduce = reduce
        self.in_features, self.out_features = in_features, out_features
        self.weight = ctx.parameter(out_features, in_features // self._group.size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features / tp] to [..., out_features].

        Complete on every rank, or with `reduce=False` this rank's part of the sum.
        """
        out = F.linear(x, self.weight)
        return self._group.all_reduce(out) if self._reduce else out

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """See `HoldsWeights`."""
        yield WeightSlice(
            name=f"{prefix}.weight",
            full_shape=(self.out_features, self.in_features),
            ranges=(
                (0, self.out_features),
                split_evenly(self.in_features, self._group.rank, self._group.size),
            ),
            destination=self.weight,
        )
