"""The plan of a load: which part of which checkpoint tensor goes where on this rank.

Layers state it, loaders carry it out, and neither knows the other. The key idea: sharding is data.
A slice says "rows a to b of tensor NAME, whose full shape must be S, go to this view of a
parameter", so the same plan serves reading from disk, checking names and shapes before anything is
read, and inventing weights that do not depend on the number of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from runtime.errors import InternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlice:
    """One part of one checkpoint tensor, and its place.

    Attributes:
        name: of the tensor in the checkpoint.
        full_shape: that the tensor must have there.
        ranges: per dimension, the half-open range to read.
        destination: view of a parameter with the shape of the ranges; written in place. None if
            the tensor belongs to the model but nothing of it to this rank.
        scale: if the destination is FP8, view of its block scales; written in place. The ranges
            then begin and end on blocks.
    """

    name: str
    full_shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    destination: Tensor | None
    scale: Tensor | None = None

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
