"""Launches the kernels for Hopper, with queries, and latents in bfloat16, told to the copy engine.

They take layers that are rows of 576 numbers in blocks of whole tiles, a fixed distance apart.
"""

from typing import Any, Final

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.attention.paged_mla import hopper_e4m3, hopper_kernel
from engine.attention.paged_mla.tiles import HOPPER_TILE
from engine.attention.paged_queries import PagedQueries
from engine.invariants import require

TILE: Final = 64
"""Rows of a program, and positions of a step."""

RANK, QUARTER, ROPE = 512, 128, 64


def attend_on_hopper(
    grid: tuple[int, int],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    queries: PagedQueries,
    table: Tensor,
    scale: float,
) -> None:
    """Write attention of a step; see `PagedMLA.paged_attention`.

    Args:
        grid: tiles of rows, parts.
        tensors: queries [T, H, 576]; a layer of a pool; out [T, H, 512]; pieces of sequences that
            are cut [2 * P * rows, 512] float32, and logarithms of their weights.
        queries: lengths, block tables and counts.
        table: of parts.
        scale: of the scores, times log2(e).
    """
    q_THL, cache, out, pieces, logs = tensors
    is_fp8 = cache.dtype == torch.float8_e4m3fn
    rows = as_rows(cache)
    kernel: Any = hopper_e4m3.attend if is_fp8 else hopper_kernel.attend
    latents: tuple[Any, Any] = (
        (rows, rows.stride(0)) if is_fp8 else (_describe(rows, QUARTER), _describe(rows, ROPE))
    )
    flat_q = q_THL.view(-1, RANK + ROPE)
    starts = queries.seq_lens_S if queries.counts is None else queries.counts.cu_seqlens_q
    kernel[grid](
        *latents, _describe(flat_q, RANK if is_fp8 else QUARTER), _describe(flat_q, ROPE),
        queries.block_tables_SB,
        queries.seq_lens_S, starts, table, out, pieces, logs,
        q_THL.shape[1], scale, cache.stride(0) // cache.stride(1),
        queries.block_tables_SB.stride(0),
        BLOCK_TILES=cache.shape[1] // TILE, ONE_QUERY=queries.counts is None,
        num_warps=HOPPER_TILE.num_warps,
    )  # fmt: skip


def as_rows(cache: Tensor) -> Tensor:
    """View a layer [num_blocks, block_size, 576] as rows, first to last; e4m3 as bytes."""
    num_blocks, block_size, latent = cache.shape
    block_stride, row_stride, _ = cache.stride()
    fits = latent == RANK + ROPE and block_size % TILE == 0 and block_stride % row_stride == 0
    require(fits, "a layer", (tuple(cache.shape), cache.stride()), "blocks of whole tiles, by rows")
    num_rows = (num_blocks - 1) * (block_stride // row_stride) + block_size
    rows = cache.as_strided((num_rows, latent), (row_stride, 1))
    return rows.view(torch.uint8) if cache.dtype.itemsize == 1 else rows


def _describe(rows: Tensor, width: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    return TensorDescriptor.from_tensor(rows, [TILE, width], layout)
