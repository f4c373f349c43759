"""Bring tokens into the contiguous layout of grouped products, and their results back.

Rows of one expert lie together, each expert's run padded to 128 rows, so that a tile of the product
belongs to one expert. The key idea: positions come from counts per block of pairs, a running sum
over the blocks, and a rank inside the block, so the order is the same every time, and no sort is
needed. The steps are few and small, and none of them needs the host.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.alignment import ROW_BLOCK, Alignment, RowCounts, max_aligned_rows
from engine.kernels.fp8_rows import Fp8Rows
from engine.kernels.masked_rows import MaskedPlaces

PAIRS = 256
"""Pairs (token, expert) of one program; they are compared with one another."""

COLUMNS = 1024
"""Columns of one program of `gather_rows`."""


@triton.jit
def _count(
    ids, counts, num_pairs, num_blocks, first, num_experts, B: tl.constexpr, E: tl.constexpr
):
    block = tl.program_id(0)
    pairs = block * B + tl.arange(0, B)
    local = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1).to(tl.int32) - first
    is_local = (local >= 0) & (local < num_experts) & (pairs < num_pairs)
    # Bin E - 1 is no expert's: num_experts < E.
    bins = tl.arange(0, E)
    found = tl.histogram(tl.where(is_local, local, E - 1), E)
    tl.store(counts + bins * num_blocks + block, found, mask=bins < num_experts)


@triton.jit
def _sum_blocks(counts, before, totals, num_blocks, B: tl.constexpr):
    """Sum one expert's counts over the blocks before each one, and over all."""
    expert = tl.program_id(0)
    blocks = tl.arange(0, B)
    place = expert * num_blocks + blocks
    found = tl.load(counts + place, mask=blocks < num_blocks, other=0)
    tl.store(before + place, tl.cumsum(found, axis=0) - found, mask=blocks < num_blocks)
    tl.store(totals + expert, tl.sum(found, axis=0))


@triton.jit
def _place(
    ids, before, totals, rows, ends, num_pairs, num_blocks, first, num_experts,
    B: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    index = tl.arange(0, B)
    pairs = block * B + index
    local = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1).to(tl.int32) - first
    is_local = (local >= 0) & (local < num_experts) & (pairs < num_pairs)
    local = tl.where(is_local, local, 0)
    same = (local[:, None] == local[None, :]) & is_local[None, :]
    rank = tl.sum((same & (index[None, :] < index[:, None])).to(tl.int32), axis=1)
    bins = tl.arange(0, E)
    padded = tl.load(totals + bins, mask=bins < num_experts, other=0)
    padded = (padded + (BLOCK - 1)) // BLOCK * BLOCK
    start = tl.sum(tl.where(bins[None, :] < local[:, None], padded[None, :], 0), axis=1)
    row = start + tl.load(before + local * num_blocks + block) + rank
    tl.store(rows + pairs, tl.where(is_local, row, -1), mask=pairs < num_pairs)
    if block == 0:
        tl.store(ends + bins, tl.cumsum(padded, axis=0), mask=bins < num_experts)


@triton.jit
def _name_blocks(ends, expert, num_experts, B: tl.constexpr, E: tl.constexpr):
    block = tl.program_id(0)
    bins = tl.arange(0, E)
    end = tl.load(ends + bins, mask=bins < num_experts, other=0)
    passed = tl.sum(((end <= block * B) & (bins < num_experts)).to(tl.int32), axis=0)
    name = tl.where(passed < num_experts, passed, -1)
    tl.store(expert + block * B + tl.arange(0, B), tl.full([B], 0, tl.int32) + name)


@triton.jit
def _spread(
    data, data_stride, scale, row_stride, group_stride, rows, out, out_scale, out_stride, max_rows,
    size, num_groups, K: tl.constexpr, C: tl.constexpr, G: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, C)
    groups = tl.arange(0, G).to(tl.int64)
    values = tl.load(data + token * data_stride + columns, mask=columns < size)
    place = scale + groups * group_stride + token * row_stride
    scales = tl.load(place, mask=groups < num_groups)
    for k in tl.static_range(K):
        row = tl.load(rows + token * K + k).to(tl.int64)
        here = row >= 0
        tl.store(out + row * size + columns, values, mask=(columns < size) & here)
        target = out_scale + groups * out_stride + row
        if IS_MASKED:
            # Each expert's scales are a matrix of their own.
            target += row // max_rows * (num_groups - 1) * max_rows
        tl.store(target, scales, mask=(groups < num_groups) & here)


@triton.jit
def _gather(
    source, rows, weights, own, out, size, K: tl.constexpr, C: tl.constexpr, HAS_OWN: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * C + tl.arange(0, C)
    mask = columns < size
    total = tl.zeros([C], tl.float32)
    if HAS_OWN:
        total += tl.load(own + token * size + columns, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        row = tl.load(rows + token * K + k).to(tl.int64)
        weight = tl.load(weights + token * K + k)
        part = tl.load(source + row * size + columns, mask=mask & (row >= 0), other=0.0)
        total += part.to(tl.float32) * weight
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=mask)


def count_rows(topk_ids_TK: Tensor, first: int, num_experts: int) -> RowCounts:
    """Choose the row of every (token, expert) pair, and count how many rows there are.

    Args:
        topk_ids_TK: [T, K] int64 physical experts; those outside of
            [first, first + num_experts) get no row.
        first: lowest expert of this rank.
        num_experts: experts of this rank.
    """
    ids = topk_ids_TK.contiguous()
    num_pairs, device = ids.numel(), ids.device
    rows_TK = torch.empty(topk_ids_TK.shape, dtype=torch.int32, device=device)
    if not num_pairs:
        ends_E = torch.zeros(num_experts, dtype=torch.int32, device=device)
        return RowCounts(rows_TK=rows_TK, ends_E=ends_E)
    bins = triton.next_power_of_2(num_experts + 1)
    num_blocks = triton.cdiv(num_pairs, PAIRS)
    # Apart, because the warps of a program hold copies of what they read: none may overwrite it.
    size = (2, num_experts, num_blocks)
    counts, before = torch.empty(size, dtype=torch.int32, device=device).unbind()
    totals, ends_E = torch.empty((2, num_experts), dtype=torch.int32, device=device).unbind()
    _count[(num_blocks,)](
        ids, counts, num_pairs, num_blocks, first, num_experts, B=PAIRS, E=bins
    )  # fmt: skip
    _sum_blocks[(num_experts,)](
        counts, before, totals, num_blocks, B=triton.next_power_of_2(num_blocks)
    )  # fmt: skip
    _place[(num_blocks,)](
        ids, before, totals, rows_TK, ends_E, num_pairs, num_blocks, first, num_experts,
        B=PAIRS, E=bins, BLOCK=ROW_BLOCK, num_warps=8,
    )  # fmt: skip
    return RowCounts(rows_TK=rows_TK, ends_E=ends_E)


def place_rows(counts: RowCounts, num_rows: int) -> Alignment:
    """Lay out `num_rows` rows, a multiple of 128 and at least `counts.num_rows`."""
    assert num_rows % ROW_BLOCK == 0, num_rows
    num_experts = counts.ends_E.shape[0]
    expert_M = torch.empty(num_rows, dtype=torch.int32, device=counts.ends_E.device)
    if num_rows:
        _name_blocks[(num_rows // ROW_BLOCK,)](
            counts.ends_E, expert_M, num_experts,
            B=ROW_BLOCK, E=triton.next_power_of_2(num_experts),
        )  # fmt: skip
    return Alignment(rows_TK=counts.rows_TK, expert_M=expert_M)


def align_to_experts(topk_ids_TK: Tensor, first: int, num_experts: int) -> Alignment:
    """Do both steps, with as many rows as any routing could need; the host learns nothing."""
    num_rows = max_aligned_rows(topk_ids_TK.numel(), num_experts)
    return place_rows(count_rows(topk_ids_TK, first, num_experts), num_rows)


def spread_rows(rows: Fp8Rows, alignment: Alignment) -> Fp8Rows:
    """Copy each token's row to all of its places: [M, D]; other rows are uninitialised."""
    device = rows.data_TK.device
    out = Fp8Rows.empty(alignment.expert_M.shape[0], rows.data_TK.shape[1], device)
    spread_into(out.data_TK, out.scale_TG, rows, alignment.rows_TK)
    return out


def spread_into(data: Tensor, scale: Tensor, rows: Fp8Rows, rows_TK: Tensor) -> None:
    """Copy each token's row to the rows of contiguous `data` that `rows_TK` names.

    Args:
        data: [M, D], or [L, M, D] in the masked layout.
        scale: [..., M, D / 128], unit stride along M.
        rows: [T, D], of any layout.
        rows_TK: [T, K] int32, -1 for no place.
    """
    (num_tokens, top_k), size = rows_TK.shape, data.shape[-1]
    if not num_tokens or not data.numel():
        return
    # Bytes as 32-bit words, so that a thread moves four at a time.
    words = rows.data_TK.view(torch.int32)
    num_groups = rows.scale_TG.shape[1]
    _spread[(num_tokens,)](
        words,
        words.stride(0),
        rows.scale_TG,
        *rows.scale_TG.stride(),
        rows_TK,
        data.view(torch.int32),
        scale,
        scale.stride(-1),
        data.shape[-2],
        size // 4,
        num_groups,
        K=top_k,
        C=triton.next_power_of_2(size // 4),
        G=triton.next_power_of_2(num_groups),
        IS_MASKED=data.dim() == 3,
    )


def gather_rows(
    source_MD: Tensor,
    places: Alignment | MaskedPlaces,
    weights_TK: Tensor,
    own_TD: Tensor | None,
) -> Tensor:
    """Return [T, D]: the weighted sum of each token's rows plus `own_TD`, summed in float32."""
    num_tokens, top_k = weights_TK.shape
    size = source_MD.shape[1]
    out = torch.empty((num_tokens, size), dtype=source_MD.dtype, device=source_MD.device)
    if not num_tokens:
        return out
    _gather[(num_tokens, triton.cdiv(size, COLUMNS))](
        source_MD,
        places.rows_TK,
        weights_TK.contiguous(),
        out if own_TD is None else own_TD.contiguous(),
        out,
        size,
        K=top_k,
        C=COLUMNS,
        HAS_OWN=own_TD is not None,
    )
    return out
