"""Permute tokens into the contiguous layout of grouped GEMMs, and unpermute their results.

Rows of one expert lie together, each expert's run padded to 128 rows, so that a tile of the GEMM
belongs to one expert. The key idea: positions come from counts per block of pairs, a running sum
over the blocks, and a rank inside the block, so the order is the same every time, and no sort is
needed. The steps are few and small, and none of them needs the host.
"""

# Triton compiles these functions itself; their arguments have no Python types.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: no-warn-return-any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.alignment import (
    ROW_BLOCK,
    Alignment,
    OverflowPlaces,
    RowCounts,
    max_aligned_rows,
)
from engine.kernels.fused.launch import ceil_div, launched, next_power_of_2
from engine.kernels.masked_rows import MaskedPlaces
from engine.kernels.widths import check_capacity, check_permute, check_unpermute

PAIRS = 256
"""Pairs (token, expert) of one program; they are compared with one another."""

COMPARED = 32
"""Pairs that all of a program's pairs are compared with at a time; they are held in registers."""

NAMED = 8
"""Blocks of rows to which one program writes their expert."""

COLUMNS = 1024
"""Columns of one program of `unpermute_rows`."""


@triton.jit
def _local_expert(ids, pairs, num_pairs, id_stride, first, num_experts, K: tl.constexpr):
    """Return the pairs' experts, counted from `first`; -1 for other ranks' and beyond the end."""
    place = pairs // K * id_stride + pairs % K
    local = tl.load(ids + place, mask=pairs < num_pairs, other=-1).to(tl.int32) - first
    return tl.where((local >= 0) & (local < num_experts), local, -1)


# What the three steps of `count_rows` leave for one another lies in one scratch, by expert and
# block: counts, their sums over the blocks before, and by expert: totals. Counts and sums are
# apart, because the warps of a program hold copies of what they read: none may overwrite it.


@launched("num_pairs", "num_blocks", "first")
def _count(
    ids, scratch, id_stride, num_experts, num_pairs, num_blocks, first,
    K: tl.constexpr, B: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    pairs = block * B + tl.arange(0, B)
    local = _local_expert(ids, pairs, num_pairs, id_stride, first, num_experts, K)
    # Bin E - 1 is no expert's: num_experts < E.
    bins = tl.arange(0, E)
    found = tl.histogram(tl.where(local >= 0, local, E - 1), E)
    tl.store(scratch + bins * num_blocks + block, found, mask=bins < num_experts)


@launched("num_blocks")
def _sum_blocks(scratch, num_experts, num_blocks, B: tl.constexpr):
    """Sum one expert's counts over the blocks before each one, and over all."""
    expert = tl.program_id(0)
    blocks = tl.arange(0, B)
    place = expert * num_blocks + blocks
    found = tl.load(scratch + place, mask=blocks < num_blocks, other=0)
    sums = scratch + num_experts * num_blocks
    tl.store(sums + place, tl.cumsum(found, axis=0) - found, mask=blocks < num_blocks)
    tl.store(sums + num_experts * num_blocks + expert, tl.sum(found, axis=0))


@triton.jit
def _rank_pairs(
    ids, pairs, local, first_pair, num_pairs, id_stride, first, num_experts,
    K: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Return how many pairs of the block come before each one and have its expert."""
    rank = tl.zeros([B], tl.int32)
    for start in range(0, B, S):
        others = first_pair + start + tl.arange(0, S)
        expert = _local_expert(ids, others, num_pairs, id_stride, first, num_experts, K)
        # [S, B] and not [B, S]: a thread sums what it has compared itself.
        is_before = (expert[:, None] == local[None, :]) & (others[:, None] < pairs[None, :])
        rank += tl.sum(is_before.to(tl.int32), axis=0)
    return rank


@launched("num_pairs", "num_blocks", "first", "num_row_blocks", "capacity")
def _place(
    ids, scratch, rows, ends, expert, overflow, id_stride, num_experts, num_pairs, num_blocks,
    first, num_row_blocks, capacity,
    K: tl.constexpr, B: tl.constexpr, S: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Place a block of pairs, or (programs beyond those) name the experts of N blocks of rows."""
    block = tl.program_id(0)
    bins = tl.arange(0, E)
    sums = scratch + num_experts * num_blocks
    totals = sums + num_experts * num_blocks
    padded = tl.load(totals + bins, mask=bins < num_experts, other=0)
    padded = (padded + (BLOCK - 1)) // BLOCK * BLOCK
    end = tl.cumsum(padded, axis=0)
    if block < num_blocks:
        pairs = block * B + tl.arange(0, B)
        local = _local_expert(ids, pairs, num_pairs, id_stride, first, num_experts, K)
        rank = _rank_pairs(
            ids, pairs, local, block * B, num_pairs, id_stride, first, num_experts, K, B, S
        )
        mine = tl.maximum(local, 0)
        row = tl.gather(end - padded, mine, 0) + tl.load(sums + mine * num_blocks + block) + rank
        tl.store(rows + pairs, tl.where(local >= 0, row, -1), mask=pairs < num_pairs)
        is_behind = (local >= 0) & (row >= capacity)
        tl.store(overflow + row - capacity, pairs // K, mask=is_behind)
        if block == 0:
            tl.store(ends + bins, end, mask=bins < num_experts)
    else:
        row_blocks = (block - num_blocks) * N + tl.arange(0, N)
        has_passed = (end[None, :] <= row_blocks[:, None] * BLOCK) & (bins < num_experts)[None, :]
        passed = tl.sum(has_passed.to(tl.int32), axis=1)
        name = tl.where(passed < num_experts, passed, -1)
        place = row_blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        names = tl.broadcast_to(name[:, None], [N, BLOCK])
        tl.store(expert + place, names, mask=(row_blocks < num_row_blocks)[:, None])


@launched("row_stride", "group_stride", "out_stride", "max_rows", "num_places")
def _permute(
    data, scale, rows, out, out_scale, data_stride, size, num_groups, row_stride, group_stride,
    out_stride, max_rows, num_places,
    K: tl.constexpr, C: tl.constexpr, G: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, C)
    groups = tl.arange(0, G).to(tl.int64)
    values = tl.load(data + token * data_stride + columns, mask=columns < size)
    place = scale + groups * group_stride + token * row_stride
    scales = tl.load(place, mask=groups < num_groups)
    for k in tl.static_range(K):
        row = tl.load(rows + token * K + k).to(tl.int64)
        here = (row >= 0) & (row < num_places)
        tl.store(out + row * size + columns, values, mask=(columns < size) & here)
        target = out_scale + groups * out_stride + row
        if IS_MASKED:
            # Each expert's scales are a matrix of their own.
            target += row // max_rows * (num_groups - 1) * max_rows
        tl.store(target, scales, mask=(groups < num_groups) & here)


@launched()
def _unpermute(
    source, rows, weights, own, out, size, weight_stride,
    K: tl.constexpr, C: tl.constexpr, HAS_OWN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * C + tl.arange(0, C)
    mask = columns < size
    total = tl.zeros([C], tl.float32)
    if HAS_OWN:
        total += tl.load(own + token * size + columns, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        row = tl.load(rows + token * K + k).to(tl.int64)
        # Weights of pairs without a row may be anything, NaN included.
        weight = tl.load(weights + token * weight_stride + k, mask=row >= 0, other=0.0)
        part = tl.load(source + row * size + columns, mask=mask & (row >= 0), other=0.0)
        total += part.to(tl.float32) * weight
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=mask)


def count_rows(topk_ids_TK: Tensor, first: int, num_experts: int) -> RowCounts:
    """Choose the row of every (token, expert) pair, and count how many rows there are.

    Args:
        topk_ids_TK: [T, K] int64 or int32 physical experts, unit stride along K; those outside of
            [first, first + num_experts) get no row.
        first: lowest expert of this rank.
        num_experts: experts of this rank.
    """
    num_rows = max_aligned_rows(topk_ids_TK.numel(), num_experts)
    return _count_rows(topk_ids_TK, first, num_experts, num_rows)[0]


def _count_rows(
    topk_ids_TK: Tensor, first: int, num_experts: int, capacity: int
) -> tuple[RowCounts, Tensor]:
    """Return the counts, and the tokens of the rows behind the capacity: [V] int32."""
    (num_tokens, top_k), device = topk_ids_TK.shape, topk_ids_TK.device
    num_pairs = num_tokens * top_k
    num_rows = max(max_aligned_rows(num_pairs, num_experts), capacity)
    rows_TK = torch.empty((num_tokens, top_k), dtype=torch.int32, device=device)
    expert_M = torch.empty(num_rows, dtype=torch.int32, device=device)
    token_V = torch.empty(num_rows - capacity, dtype=torch.int32, device=device)
    if not num_pairs:
        ends_E = torch.zeros(num_experts, dtype=torch.int32, device=device)
        return RowCounts(rows_TK=rows_TK, ends_E=ends_E, expert_M=expert_M), token_V
    ids = topk_ids_TK if topk_ids_TK.stride(1) == 1 else topk_ids_TK.contiguous()
    ends_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    num_blocks, num_row_blocks = ceil_div(num_pairs, PAIRS), num_rows // ROW_BLOCK
    scratch = torch.empty((2 * num_blocks + 1) * num_experts, dtype=torch.int32, device=device)
    sizes = (ids.stride(0), num_experts)
    _count(
        (num_blocks,),
        (ids, scratch),
        sizes,
        (num_pairs, num_blocks, first),
        (top_k, PAIRS, next_power_of_2(num_experts + 1)),
    )
    _sum_blocks(
        (num_experts,),
        (scratch,),
        (num_experts,),
        (num_blocks,),
        (next_power_of_2(num_blocks),),
    )
    _place(
        (num_blocks + ceil_div(num_row_blocks, NAMED),),
        (ids, scratch, rows_TK, ends_E, expert_M, token_V if len(token_V) else rows_TK),
        sizes,
        (num_pairs, num_blocks, first, num_row_blocks, capacity),
        (top_k, PAIRS, COMPARED, next_power_of_2(num_experts), ROW_BLOCK, NAMED),
        num_warps=8,
    )
    return RowCounts(rows_TK=rows_TK, ends_E=ends_E, expert_M=expert_M), token_V


def moe_align_block_size(
    topk_ids_TK: Tensor, first: int, num_experts: int, capacity: int | None = None
) -> Alignment:
    """Lay out as many rows as any routing could need; the host learns nothing.

    Args:
        topk_ids_TK: as in `count_rows`.
        first: lowest expert of this rank.
        num_experts: experts of this rank.
        capacity: rows before the overflow, a multiple of 128; None for all of them. So many are
            laid out, also if none could need them.
    """
    if capacity is None:
        capacity = max_aligned_rows(topk_ids_TK.numel(), num_experts)
    check_capacity(capacity)
    counts, token_V = _count_rows(topk_ids_TK, first, num_experts, capacity)
    overflow = None
    if token_V.shape[0]:
        overflow = OverflowPlaces(capacity=capacity, ends_E=counts.ends_E, token_V=token_V)
    return Alignment(rows_TK=counts.rows_TK, expert_M=counts.expert_M, overflow=overflow)


def permute_rows(rows: Fp8Rows, alignment: Alignment) -> Fp8Rows:
    """Copy each token's row to its places before the capacity C; other rows are uninitialised.

    Returns:
        [C, D].
    """
    out = Fp8Rows.empty(alignment.capacity, rows.data_TK.shape[1], rows.data_TK.device)
    permute_into(out.data_TK, out.scale_TG, rows, alignment.rows_TK)
    return out


def permute_into(data: Tensor, scale: Tensor, rows: Fp8Rows, rows_TK: Tensor) -> None:
    """Copy each token's row to the rows of contiguous `data` that `rows_TK` names and `data` has.

    Args:
        data: [M, D], or [L, M, D] in the masked layout.
        scale: [..., M, D / 128], unit stride along M.
        rows: [T, D], of any layout.
        rows_TK: [T, K] int32, -1 for no place.
    """
    check_permute(data, scale, rows, rows_TK)
    (num_tokens, top_k), size = rows_TK.shape, data.shape[-1]
    if not num_tokens or not data.numel():
        return
    # Bytes as 32-bit words, so that a thread moves four at a time.
    words = rows.data_TK.view(torch.int32)
    num_groups = rows.scale_TG.shape[1]
    _permute(
        (num_tokens,),
        (words, rows.scale_TG, rows_TK, data.view(torch.int32), scale),
        (words.stride(0), size // 4, num_groups),
        (*rows.scale_TG.stride(), scale.stride(-1), data.shape[-2], data.numel() // size),
        (
            top_k,
            next_power_of_2(size // 4),
            next_power_of_2(num_groups),
            data.dim() == 3,
        ),
    )


def unpermute_rows(
    source_MD: Tensor,
    places: Alignment | MaskedPlaces,
    weights_TK: Tensor,
    own_TD: Tensor | None,
) -> Tensor:
    """Return [T, D]: the weighted sum of each token's rows plus `own_TD`, summed in float32."""
    check_unpermute(source_MD, places, weights_TK, own_TD)
    num_tokens, top_k = weights_TK.shape
    size = source_MD.shape[1]
    out = torch.empty((num_tokens, size), dtype=source_MD.dtype, device=source_MD.device)
    if not num_tokens:
        return out
    if weights_TK.stride(1) != 1:
        weights_TK = weights_TK.contiguous()
    _unpermute(
        (num_tokens, ceil_div(size, COLUMNS)),
        (
            source_MD,
            places.rows_TK,
            weights_TK,
            out if own_TD is None else own_TD.contiguous(),
            out,
        ),
        (size, weights_TK.stride(0)),
        constants=(top_k, COLUMNS, own_TD is not None),
    )
    return out
