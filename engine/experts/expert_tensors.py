"""The experts of a rank as tensors, and one of them as bytes: how it lies where it travels.

The matrices and scales of one slot lie one behind the other, each from a whole row of the checksum
on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from runtime.errors import InternalError

ROW_BYTES: Final = 256
"""Of a row of the checksum."""


class ExpertTensors:
    """The routed experts of a rank: for every MoE layer what a slot's weights and scales lie in.

    Attributes:
        device: where they are.
        num_layers: with experts.
        num_slots: of this rank, in every layer.
        sizes: bytes of a slot in each tensor of a layer.
    """

    def __init__(self, layers: Sequence[Sequence[Tensor]]) -> None:
        """Take [slots, ...] tensors, the same ones in each layer; contiguous, written in place.

        Raises:
            InternalError: layers that differ in shape: an expert of one would not fit into another.
        """
        self._layers = [[_bytes_of_slots(tensor) for tensor in layer] for layer in layers]
        shapes = {tuple(tuple(part.shape) for part in layer) for layer in self._layers}
        if len(shapes) != 1:
            raise InternalError(f"experts of unlike sizes in one model: {sorted(shapes)}")
        (first,) = shapes
        self.device, self.num_layers = layers[0][0].device, len(self._layers)
        self.num_slots = first[0][0]
        self.sizes = tuple(size for _, size in first)

    def of(self, layer: int, slot: int) -> list[Tensor]:
        """Return the bytes of a slot of this rank, one view for each tensor."""
        return [part[slot] for part in self._layers[layer]]

    def packed(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """Return a slot's content as it travels, [content_bytes] uint8, and its checksum."""
        parts = self.of(layer, slot)
        content = torch.zeros(content_bytes(self), dtype=torch.uint8, device=parts[0].device)
        for place, part in zip(places_of(content, self.sizes), parts, strict=True):
            place.copy_(part)
        return content, checksum_of(content, row_factors(content))


def _bytes_of_slots(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous()
    return tensor.detach().view(tensor.shape[0], -1).view(torch.uint8)


def checksum_of(content: Tensor, factors: Tensor) -> Tensor:
    """Return the checksum of all behind a header: [] int64, which wraps."""
    rows = content.view(torch.int32).view(len(factors), -1)
    return (rows.sum(dim=1, dtype=torch.int64) * factors).sum()


def content_bytes(tensors: ExpertTensors) -> int:
    """Return the bytes of an expert as it travels, without a header."""
    return sum(map(_padded, tensors.sizes))


def row_factors(content: Tensor) -> Tensor:
    """Return a factor for each row of a content; odd, so that a row that differs at all changes the
    sum, and unlike, so that rows have places.
    """
    rows = content.nbytes // ROW_BYTES
    return torch.arange(rows, dtype=torch.int64, device=content.device) * 2 + 1


def places_of(content: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return where the tensors of a slot lie in a content, one view for each."""
    places, start = [], 0
    for size in sizes:
        places.append(content[start : start + size])
        start += _padded(size)
    return places


def _padded(size: int) -> int:
    return -(-size // ROW_BYTES) * ROW_BYTES
