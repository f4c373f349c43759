"""The experts of a rank as tensors, and one of them as bytes: how it lies where it travels.

The matrices and scales of one slot lie one behind the other, each from a whole row of the checksum
on. Their bytes fall into *pieces* of about equal size, of whole rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from runtime.errors import InternalError

ROW_BYTES: Final = 256
"""Of a row of the checksum."""
_WORD_BYTES: Final = 4


class Part(NamedTuple):
    """What of one tensor is in a piece.

    Attributes:
        tensor: its number among those of a layer.
        start: of the part, in bytes of a slot.
        end: the same.
        place: where it lies among the expert's bytes.
    """

    tensor: int
    start: int
    end: int
    place: int


class Piece(NamedTuple):
    """Bytes [start, end) of an expert, and what of each tensor is in them."""

    start: int
    end: int
    parts: tuple[Part, ...]


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
            InternalError: layers that differ in shape: an expert of one would not fit into another;
                or slots of no whole number of words.
        """
        self._layers = [[_bytes_of_slots(tensor) for tensor in layer] for layer in layers]
        shapes = {tuple(tuple(part.shape) for part in layer) for layer in self._layers}
        if len(shapes) != 1:
            raise InternalError(f"experts of unlike sizes in one model: {sorted(shapes)}")
        (first,) = shapes
        self.device, self.num_layers = layers[0][0].device, len(self._layers)
        self.num_slots = first[0][0]
        self.sizes = tuple(size for _, size in first)
        if any(size % _WORD_BYTES for size in self.sizes):
            raise InternalError(f"slots of {self.sizes} bytes, which are not all of whole words")

    def of(self, layer: int, slot: int) -> list[Tensor]:
        """Return the bytes of a slot of this rank, one view for each tensor."""
        return [part[slot] for part in self._layers[layer]]

    def packed(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """Return a slot's content as it travels, [content_bytes] uint8, and its checksum."""
        parts = self.of(layer, slot)
        content = torch.zeros(content_bytes(self), dtype=torch.uint8, device=parts[0].device)
        for place, part in zip(places_of(content, self.sizes), parts, strict=True):
            place.copy_(part)
        return content, checksum_of(row_sums(content), row_factors(content))


def _bytes_of_slots(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous()
    return tensor.detach().view(tensor.shape[0], -1).view(torch.uint8)


def checksum_of(sums: Tensor, factors: Tensor) -> Tensor:
    """Return a checksum, [] int64, which wraps: an expert's is that of its pieces, added up.

    Args:
        sums: [rows] int64 of a piece, or of all (`row_sums`).
        factors: of these rows (`row_factors`).
    """
    return (sums * factors).sum()


def row_sums(content: Tensor) -> Tensor:
    """Return what the words of each row add up to, [rows] int64; what a short last one lacks is 0.

    Args:
        content: [bytes] uint8, from the beginning of a row on.
    """
    whole = content[: content.nbytes // ROW_BYTES * ROW_BYTES]
    rows = whole.view(torch.int32).view(-1, ROW_BYTES // _WORD_BYTES)
    sums = rows.sum(dim=1, dtype=torch.int64)
    if whole.nbytes == content.nbytes:
        return sums
    rest = content[whole.nbytes :].view(torch.int32).sum(dim=0, keepdim=True, dtype=torch.int64)
    return torch.cat([sums, rest])


def pieces_of(sizes: Sequence[int], piece_bytes: int) -> list[Piece]:
    """Cut an expert's bytes into the fewest pieces of so many bytes, or of one row.

    Args:
        sizes: bytes of a slot in each tensor.
        piece_bytes: of a piece, at most, rounded up to whole rows.
    """
    ends = list(accumulate(map(_padded, sizes)))
    num_rows, most = ends[-1] // ROW_BYTES, _padded(piece_bytes) // ROW_BYTES
    count = -(-num_rows // most)
    bounds = [num_rows * number // count * ROW_BYTES for number in range(count + 1)]
    return [
        Piece(start, end, tuple(_parts_of(sizes, [0, *ends], start, end)))
        for start, end in pairwise(bounds)
    ]


def _parts_of(sizes: Sequence[int], places: Sequence[int], start: int, end: int) -> Iterator[Part]:
    for tensor, (size, place) in enumerate(zip(sizes, places, strict=False)):
        first, last = max(start - place, 0), min(end - place, size)
        if first < last:
            yield Part(tensor, first, last, place + first)


def content_bytes(tensors: ExpertTensors) -> int:
    """Return the bytes of an expert as it travels, without its canary."""
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
