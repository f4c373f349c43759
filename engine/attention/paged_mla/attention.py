"""Absorbed attention to pages by our own kernel: chooses tiles, makes parts, launches.

The counterpart of `engine.attention.flash_mla.FlashMLA` for any GPU from Ampere on, any block size,
and any number of new tokens a sequence. Nothing here waits for the device; a step whose lengths
the host does not know is planned on the device too, so that a graph can hold it.
"""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from engine.attention.paged_mla import kernel
from engine.attention.paged_mla.parts import PART_INTS, count_parts, parts_on_host
from engine.attention.paged_mla.tiles import PagedTile, PoolShape, candidates
from engine.attention.paged_queries import PagedParts, PagedQueries
from engine.attention.schedule_reference import PAGE
from engine.formats.triton_gemm.limits import DeviceLimits
from engine.host_copy import upload
from engine.invariants import require
from engine.kernels.fused.launch import ceil_div
from engine.kernels.fused.schedule import MAX_SEQS, schedule

LOG2_E: Final = 1.4426950408889634

MERGED_ROWS: Final = 4
"""Rows of a program that merges pieces."""

MAX_WIDTH: Final = 512
"""Of values, for which the sums of a tile fit the registers."""


class PagedMLA:
    """The kernel on one kind of GPU."""

    def __init__(self, limits: DeviceLimits, tile: PagedTile | None = None) -> None:
        """Take what the GPU can hold, and a tile for all shapes instead of the chosen ones."""
        self._limits = limits
        self._tile = tile

    def why_not(self, cache: Tensor, kv_lora_rank: int) -> str:
        """Return why a layer [num_blocks, block_size, L] of a pool is not taken, or nothing."""
        rope = cache.shape[2] - kv_lora_rank
        for name, size in (("kv_lora_rank", kv_lora_rank), ("qk_rope_head_dim", rope)):
            if not 16 <= size <= MAX_WIDTH or size & (size - 1):
                return f"{name} {size} is no power of two from 16 to {MAX_WIDTH}"
        if cache.dtype.itemsize != 2 and cache.dtype != torch.float8_e4m3fn:
            return f"the KV pool is in {cache.dtype}, not in bfloat16 or e4m3"
        return ""

    def plan(self, queries: PagedQueries, cache: Tensor, num_heads: int) -> PagedQueries:
        """Return `queries` with parts for layers like `cache`; see `PageAttention`."""
        counts, seq_lens_S = queries.counts, queries.seq_lens_S
        tile = self.tile(cache, queries.most * num_heads)
        places = self._limits.num_sms * tile.per_sm
        if counts is not None and counts.lengths:
            tiles = [ceil_div(queries * num_heads, tile.block_m) for queries, _ in counts.lengths]
            rows, may_cut = parts_on_host(counts.lengths, tiles, places)
            (table,) = upload([rows], seq_lens_S.device)
        else:
            num_parts = count_parts(places, ceil_div(queries.most * num_heads, tile.block_m))
            table, may_cut = _parts_on_device(seq_lens_S, num_parts), num_parts > 1
        return replace(queries, parts=PagedParts(table=table, may_cut=may_cut))

    def tile(self, cache: Tensor, num_rows: int) -> PagedTile:
        """Return the tile for sequences of up to `num_rows` rows, heads times new tokens."""
        if self._tile is not None:
            return self._tile
        return candidates(self._limits, num_rows, PoolShape.of(cache))[0]

    def paged_attention(
        self, q_THL: Tensor, cache: Tensor, queries: PagedQueries, kv_lora_rank: int, scale: float
    ) -> Tensor:
        """Return [T, H, C]; see `paged_reference`.

        Args:
            q_THL: in 16 bits, contiguous; queries of a sequence one after another.
            cache: a layer that `why_not` says nothing against.
            queries: as `plan` made them for layers like this one and as many heads.
            kv_lora_rank: C.
            scale: of the scores.
        """
        num_tokens, num_heads, _ = q_THL.shape
        _check_memory(q_THL, cache, queries, kv_lora_rank)
        shape, device = (num_tokens, num_heads, kv_lora_rank), q_THL.device
        out = torch.empty(shape, dtype=q_THL.dtype, device=device)
        if not num_tokens:
            return out
        parts = queries.parts
        assert parts is not None
        tile = self.tile(cache, queries.most * num_heads)
        num_tiles = ceil_div(queries.most * num_heads, tile.block_m)
        num_parts, max_rows = parts.table.shape[0], num_tiles * tile.block_m
        num_slots = 2 * num_parts * max_rows if parts.may_cut else 1
        pieces = torch.empty((num_slots, kv_lora_rank), dtype=torch.float32, device=device)
        logs = torch.empty(num_slots, dtype=torch.float32, device=device)
        self._attend(
            (num_tiles, num_parts), tile, (q_THL, cache, out, pieces, logs), queries, scale
        )
        if parts.may_cut:
            kernel.merge(
                (ceil_div(max_rows, MERGED_ROWS), num_parts),
                (parts.table, queries.seq_lens_S, _starts(queries), pieces, logs, out),
                (num_heads,),
                (max_rows,),
                (MERGED_ROWS, kv_lora_rank, PAGE, queries.counts is None),
            )
        return out

    def _attend(
        self,
        grid: tuple[int, int],
        tile: PagedTile,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        queries: PagedQueries,
        scale: float,
    ) -> None:
        q_THL, cache, out, pieces, logs = tensors
        assert queries.parts is not None
        if tile.is_hopper:
            # Needs what Triton has for this GPU only.
            from engine.attention.paged_mla.hopper_attention import attend_on_hopper

            attend_on_hopper(grid, tensors, queries, queries.parts.table, scale * LOG2_E, tile=tile)
            return
        stored = self._stored(cache)
        widened = 256.0 if stored == kernel.BYTES.value else 1.0
        rank, block_size = out.shape[2], cache.shape[1]
        kernel.attend(
            grid,
            (
                q_THL, cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache,
                queries.block_tables_SB, queries.seq_lens_S, _starts(queries),
                queries.parts.table, out, pieces, logs,
            ),
            (q_THL.shape[1], scale * LOG2_E * widened, cache.stride(0)),
            (queries.block_tables_SB.stride(0),),
            (
                tile.block_m, tile.block_n, rank, cache.shape[2] - rank, block_size,
                cache.stride(1), PAGE, stored, queries.counts is None,
                PAGE % tile.block_n == 0 and block_size % tile.block_n == 0,
            ),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip

    def _stored(self, cache: Tensor) -> int:
        """Return how the kernel is told that latents are stored."""
        if cache.dtype.itemsize == 2:
            return int(kernel.PLAIN.value)
        return int((kernel.E4M3 if self._limits.has_fp8 else kernel.BYTES).value)


def _check_memory(q_THL: Tensor, cache: Tensor, queries: PagedQueries, rank: int) -> None:
    """Check what the kernel addresses memory by.

    Raises:
        InternalError: tensors are not what it takes them for.
    """
    num_tokens, _, latent = q_THL.shape
    is_16_bit = q_THL.dtype.itemsize == 2 and cache.dtype in (q_THL.dtype, torch.float8_e4m3fn)
    require(is_16_bit, "queries and latents", (q_THL.dtype, cache.dtype), "alike, or e4m3")
    is_dense = q_THL.is_contiguous() and cache.stride(2) == 1
    require(is_dense, "queries and latents", (q_THL.stride(), cache.stride()), "without gaps")
    widths = (latent, cache.shape[2], rank)
    require(latent == cache.shape[2] > rank, "widths", widths, "equal, and beyond the values'")
    tables, lens, starts = queries.block_tables_SB, queries.seq_lens_S, _starts(queries)
    num_seqs = tables.shape[0]
    num_starts = num_tokens if queries.counts is None else num_seqs + 1
    sizes = (num_seqs, lens.shape[0], num_tokens, starts.shape[0])
    is_same = sizes[0] == sizes[1] and starts.shape[0] == num_starts
    require(is_same, "sequences", sizes, "as many of each")
    types = {tables.dtype, lens.dtype, starts.dtype}
    require(types == {torch.int32}, "tables and lengths", types, "int32")
    require(tables.stride(1) == 1, "tables", tables.stride(), "rows without gaps")


def _starts(queries: PagedQueries) -> Tensor:
    """Return where each sequence's queries begin; with one each, anything: it is not read."""
    return queries.seq_lens_S if queries.counts is None else queries.counts.cu_seqlens_q


def _parts_on_device(seq_lens_S: Tensor, num_parts: int) -> Tensor:
    """Return [P, 8] for lengths [S], without a host read; P holds for each MAX_SEQS sequences."""
    tables = []
    for first in range(0, seq_lens_S.shape[0], MAX_SEQS):
        table, _ = schedule(seq_lens_S[first : first + MAX_SEQS], num_parts)
        if first:
            table[:, :2] += first  # numbers of sequences
        tables.append(table)
    if not tables:
        return seq_lens_S.new_empty((0, PART_INTS))
    return tables[0] if len(tables) == 1 else torch.cat(tables)
