"""The parts of weights that are brought into the cache before they are needed.

A list of addresses of equally long pieces of memory, made once, when weights have their place. What
is brought in early is a matter of speed only: nothing depends on whether it happens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_BYTES = 8192
"""Of one request: long enough that requests are few, short enough to spread over the GPU."""
ALIGNMENT = 16
"""Bytes; a request begins and ends at a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChunks:
    """Pieces of memory of one length.

    Attributes:
        addresses_N: [N] int64, on the device; multiples of 16.
        chunk_bytes: of each.
    """

    addresses_N: Tensor
    chunk_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return self.addresses_N.shape[0] * self.chunk_bytes


def first_chunks(
    weights: Sequence[Tensor], num_bytes: int, chunk_bytes: int = CHUNK_BYTES
) -> WeightChunks | None:
    """Return the first bytes of the weights, one weight after the other; None if there are none.

    What is left of a weight behind its last whole chunk is left out.

    Args:
        weights: contiguous, in the order in which they will be read; they must not move any more.
        num_bytes: at most so many.
        chunk_bytes: a multiple of 16.
    """
    assert chunk_bytes % ALIGNMENT == 0, chunk_bytes
    addresses = list(_addresses(weights, num_bytes, chunk_bytes))
    if not addresses:
        return None
    on_host = torch.tensor(addresses, dtype=torch.int64)
    return WeightChunks(addresses_N=on_host.to(weights[0].device), chunk_bytes=chunk_bytes)


def _addresses(weights: Sequence[Tensor], num_bytes: int, chunk_bytes: int) -> Iterator[int]:
    left = num_bytes // chunk_bytes
    for weight in weights:
        assert weight.is_contiguous()
        first = -(-weight.data_ptr() // ALIGNMENT) * ALIGNMENT
        end = weight.data_ptr() + weight.numel() * weight.element_size()
        count = min(left, max(end - first, 0) // chunk_bytes)
        yield from range(first, first + count * chunk_bytes, chunk_bytes)
        left -= count
