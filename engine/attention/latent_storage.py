"""Latents in and out of one layer of a KV pool, in plain PyTorch, for every dtype of a pool.

A pool in e4m3 holds the numbers as they are, with scale 1. Those of the bundled model are far from
its limits (448 and 2**-9); what is beyond 448 saturates. Not every device indexes e4m3, so it
travels as bytes.
"""

import torch
from torch import Tensor

E4M3_MAX = 448.0


def to_storage(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in the dtype of a pool; e4m3 saturates, because a cast would give NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def take_blocks(cache: Tensor, block_ids: Tensor) -> Tensor:
    """Return blocks [*, block_size, L] of a layer [num_blocks, block_size, L] for ids [*]."""
    if cache.dtype.itemsize > 1:
        return cache[block_ids]
    return cache.view(torch.uint8)[block_ids].view(cache.dtype)


def put_rows(cache: Tensor, slots_T: Tensor, rows_TL: Tensor) -> None:
    """Write rows [T, L], converted, at slots [T] int64 of a layer."""
    blocks = torch.div(slots_T, cache.shape[1], rounding_mode="floor")
    stored = to_storage(rows_TL, cache.dtype)
    if cache.dtype.itemsize == 1:
        cache, stored = cache.view(torch.uint8), stored.view(torch.uint8)
    cache[blocks, slots_T % cache.shape[1]] = stored
