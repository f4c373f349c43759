"""Launches the kernels for Hopper: describes a layer of a pool to the copy engine.

They take layers that are rows of 576 numbers in blocks of whole tiles, a fixed distance apart.
"""

from typing import Any, Final

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.attention.paged_mla import (
    hopper_direct,
    hopper_e4m3,
    hopper_halves,
    hopper_kernel,
    hopper_seesaw,
    hopper_seesaw_e4m3,
)
from engine.attention.paged_mla.tiles import PagedTile
from engine.attention.paged_queries import PagedQueries
from engine.invariants import require

TILE: Final = 64
"""Rows of a program, and positions of a step."""

RANK, ROPE = 512, 64

_VARIANTS: Final = {
    "seesaw": hopper_seesaw,
    "halves": hopper_halves,
    "direct": hopper_direct,
    "seesaw_e4m3": hopper_seesaw_e4m3,
}


def attend_on_hopper(
    grid: tuple[int, int],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    queries: PagedQueries,
    table: Tensor,
    scale: float,
    *,
    tile: PagedTile,
) -> None:
    """Write attention of a step; see `PagedMLA.paged_attention`.

    Args:
        grid: tiles of rows, parts.
        tensors: queries [T, H, 576]; a layer of a pool; out [T, H, 512]; pieces of sequences that
            are cut [2 * P * rows, 512] float32, and logarithms of their weights.
        queries: lengths, block tables and counts.
        table: of parts.
        scale: of the scores, times log2(e).
        tile: says which kernel, and its warps.
    """
    q_THL, cache, out, pieces, logs = tensors
    is_fp8 = cache.dtype == torch.float8_e4m3fn
    rows = as_rows(cache)
    module: Any = _VARIANTS.get(tile.variant, hopper_e4m3 if is_fp8 else hopper_kernel)
    where: tuple[Any, Any] = (
        _describe(rows, getattr(module, "WIDTH", RANK)),
        _describe(rows, ROPE),
    )
    if hasattr(module, "READS_ROWS"):
        where = (rows, rows.stride(0))
    starts = queries.seq_lens_S if queries.counts is None else queries.counts.cu_seqlens_q
    module.attend[grid](
        *where, q_THL, queries.block_tables_SB,
        queries.seq_lens_S, starts, table, out, pieces, logs,
        q_THL.shape[1], scale, cache.stride(0) // cache.stride(1),
        queries.block_tables_SB.stride(0),
        BLOCK_TILES=cache.shape[1] // TILE, ONE_QUERY=queries.counts is None,
        num_warps=tile.num_warps,
    )  # fmt: skip


def as_rows(cache: Tensor) -> Tensor:
    """View a layer [num_blocks, block_size, 576] as rows from its first to its last."""
    num_blocks, block_size, latent = cache.shape
    block_stride, row_stride, _ = cache.stride()
    fits = latent == RANK + ROPE and block_size % TILE == 0 and block_stride % row_stride == 0
    require(fits, "a layer", (tuple(cache.shape), cache.stride()), "blocks of whole tiles, by rows")
    num_rows = (num_blocks - 1) * (block_stride // row_stride) + block_size
    rows = cache.as_strided((num_rows, latent), (row_stride, 1))
    # The copy engine moves bytes, whatever they mean.
    return rows.view(torch.uint8) if cache.dtype.itemsize == 1 else rows


def _describe(rows: Tensor, width: int) -> TensorDescriptor:
    bits = 8 * rows.dtype.itemsize
    swizzle = min(128, width * rows.dtype.itemsize)
    layout = gl.NVMMASharedLayout(swizzle, bits, rank=2)
    return TensorDescriptor.from_tensor(rows, [TILE, width], layout)
