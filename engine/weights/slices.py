"""The plan of a load: which part of which checkpoint tensor goes where on this rank.

Layers state it, loaders carry it out, and neither knows the other. The key idea: sharding is data.
A slice says "rows a to b of tensor NAME, whose full shape must be S, go to this view of a
parameter", so the same plan serves reading from disk, checking names and shapes before anything is
read, and inventing weights that do not depend on the number of ranks. Which numbers are written
there is the rule of the weight's format.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from torch import Tensor

from runtime.errors import InternalError


class TensorSource(Protocol):
    """A checkpoint, as rules read it."""

    def read(self, name: str, ranges: tuple[tuple[int, int], ...]) -> Tensor:
        """Return part of a tensor, dequantised."""
        ...

    def read_quantized(
        self, name: str, ranges: tuple[tuple[int, int], ...]
    ) -> tuple[Tensor, Tensor]:
        """Return part of a tensor as it is stored, and its scales."""
        ...


class LoadRule(Protocol):
    """How the numbers of a slice become those of its place."""

    def read(self, source: TensorSource, part: "WeightSlice") -> None:
        """Write a slice that has a place, from a checkpoint."""
        ...

    def draw(self, values: Tensor, part: "WeightSlice") -> None:
        """Write invented values, of the shape of the slice's ranges, to its place."""
        ...


class AsNumbers:
    """See `LoadRule`: numbers as they are, in the dtype of their place."""

    def read(self, source: TensorSource, part: "WeightSlice") -> None:
        """See `LoadRule`."""
        assert part.destination is not None
        part.destination.copy_(source.read(part.name, part.ranges))

    def draw(self, values: Tensor, part: "WeightSlice") -> None:
        """See `LoadRule`."""
        assert part.destination is not None
        part.destination.copy_(values)


AS_NUMBERS: Final = AsNumbers()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlice:
    """One part of one checkpoint tensor, and its place.

    Attributes:
        name: of the tensor in the checkpoint.
        full_shape: that the tensor must have there.
        ranges: per dimension, the half-open range to read.
        destination: view of a parameter with the shape of the ranges; written in place. None if
            the tensor belongs to the model but nothing of it to this rank.
        scale: if the destination has scales, view of them; written in place. The ranges then begin
            and end where scales do.
        rule: of the destination's format.
    """

    name: str
    full_shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    destination: Tensor | None
    scale: Tensor | None = None
    rule: LoadRule = AS_NUMBERS

    @classmethod
    def whole(cls, name: str, destination: Tensor) -> "WeightSlice":
        """Return the slice for a tensor that every rank holds entirely."""
        shape = tuple(destination.shape)
        ranges = tuple((0, size) for size in shape)
        return cls(name=name, full_shape=shape, ranges=ranges, destination=destination)

    @classmethod
    def elsewhere(cls, name: str, full_shape: tuple[int, ...]) -> "WeightSlice":
        """Return the slice for a tensor that other ranks hold."""
        return cls(name=name, full_shape=full_shape, ranges=(), destination=None)


@runtime_checkable
class HoldsWeights(Protocol):
    """A module that has parameters of its own (not only those of its children)."""

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices that fill this module, whose name in the model is `prefix`."""
        ...


def split_evenly(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the half-open range of `rank`'s share.

    Raises:
        InternalError: `size` is no multiple of `num_ranks`: rows would be lost, so
            `ParallelDims.check_model` refuses such a model.
    """
    if size % num_ranks:
        raise InternalError(f"{size} rows cannot be split evenly over {num_ranks} ranks")
    share = size // num_ranks
    return rank * share, (rank + 1) * share
