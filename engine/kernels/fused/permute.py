"""Bring tokens into the contiguous layout of grouped products, and their results back.

Rows of one expert lie together, each expert's run padded to 128 rows, so that a tile of the product
belongs to one expert. The number of rows is an upper bound known on the host: nobody waits for the
device to count. The key idea: positions come from counts per block of pairs, a running sum over the
blocks, and a rank inside the block, so the order is the same every time, and no sort is needed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.alignment import ROW_BLOCK, Alignment, max_aligned_rows
from engine.kernels.fp8_rows import Fp8Rows

PAIRS = 256
"""Pairs (token, expert) of one program; they are compared with one another."""

COLUMNS = 1024
"""Columns of one program of `gather_rows`."""


@triton.jit
def _count(ids, counts, num_pairs, first, num_experts, B: tl.constexpr, E: tl.constexpr):
    block = tl.program_id(0)
    pairs = block * B + tl.arange(0, B)
    local = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1).to(tl.int32) - first
    is_local = (local >= 0) & (local < num_experts) & (pairs < num_pairs)
    # Bin E - 1 is no expert's: num_experts < E.
    tl.store(
        counts + block * E + tl.arange(0, E), tl.histogram(tl.where(is_local, local, E - 1), E)
    )


@triton.jit
def _place(
    ids, before, starts, rows, num_pairs, first, num_experts, B: tl.constexpr, E: tl.constexpr
):
    block = tl.program_id(0)
    index = tl.arange(0, B)
    pairs = block * B + index
    local = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1).to(tl.int32) - first
    is_local = (local >= 0) & (local < num_experts) & (pairs < num_pairs)
    local = tl.where(is_local, local, 0)
    same = (local[:, None] == local[None, :]) & is_local[None, :]
    rank = tl.sum((same & (index[None, :] < index[:, None])).to(tl.int32), axis=1)
    row = tl.load(starts + local) + tl.load(before + block * E + local) + rank
    tl.store(rows + pairs, tl.where(is_local, row, -1), mask=pairs < num_pairs)


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
    data, scale, scale_stride, rows, out, out_scale, out_stride, size, num_groups,
    K: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, C)
    groups = tl.arange(0, G)
    values = tl.load(data + token * size + columns, mask=columns < size)
    scales = tl.load(scale + groups * scale_stride + token, mask=groups < num_groups)
    for k in tl.static_range(K):
        row = tl.load(rows + token * K + k).to(tl.int64)
        here = row >= 0
        tl.store(out + row * size + columns, values, mask=(columns < size) & here)
        tl.store(
            out_scale + groups.to(tl.int64) * out_stride + row,
            scales,
            mask=(groups < num_groups) & here,
        )


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


def align_to_experts(topk_ids_TK: Tensor, first: int, num_experts: int) -> Alignment:
    """Choose the row of every (token, expert) pair; see `Alignment`.

    Args:
        topk_ids_TK: [T, K] int64 physical experts; those outside of
            [first, first + num_experts) get no row.
        first: lowest expert of this rank.
        num_experts: experts of this rank.
    """
    ids = topk_ids_TK.contiguous()
    num_pairs, device = ids.numel(), ids.device
    bins = triton.next_power_of_2(num_experts + 1)
    num_blocks = triton.cdiv(num_pairs, PAIRS)
    num_rows = max_aligned_rows(num_pairs, num_experts)
    counts = torch.empty((num_blocks, bins), dtype=torch.int32, device=device)
    rows_TK = torch.empty(topk_ids_TK.shape, dtype=torch.int32, device=device)
    expert_M = torch.empty(num_rows, dtype=torch.int32, device=device)
    _count[(num_blocks,)](ids, counts, num_pairs, first, num_experts, B=PAIRS, E=bins)
    until = counts.cumsum(0, dtype=torch.int32)
    padded = (until[-1, :num_experts] + (ROW_BLOCK - 1)) // ROW_BLOCK * ROW_BLOCK
    ends = padded.cumsum(0, dtype=torch.int32)
    _place[(num_blocks,)](
        ids, until - counts, ends - padded, rows_TK, num_pairs, first, num_experts,
        B=PAIRS, E=bins,
    )  # fmt: skip
    _name_blocks[(num_rows // ROW_BLOCK,)](ends, expert_M, num_experts, B=ROW_BLOCK, E=bins)
    return Alignment(rows_TK=rows_TK, expert_M=expert_M)


def spread_rows(rows: Fp8Rows, alignment: Alignment) -> Fp8Rows:
    """Copy each token's row to all of its places: [M, D]; other rows are uninitialised."""
    num_tokens, size = rows.data_TK.shape
    out = Fp8Rows.empty(alignment.expert_M.shape[0], size, rows.data_TK.device)
    num_groups = rows.scale_TG.shape[1]
    # Bytes as 32-bit words, so that a thread moves four at a time.
    _spread[(num_tokens,)](
        rows.data_TK.view(torch.int32),
        rows.scale_TG,
        rows.scale_TG.stride(1),
        alignment.rows_TK,
        out.data_TK.view(torch.int32),
        out.scale_TG,
        out.scale_TG.stride(1),
        size // 4,
        num_groups,
        K=alignment.rows_TK.shape[1],
        C=triton.next_power_of_2(size // 4),
        G=triton.next_power_of_2(num_groups),
    )
    return out


def gather_rows(
    source_MD: Tensor, alignment: Alignment, weights_TK: Tensor, own_TD: Tensor | None
) -> Tensor:
    """Return [T, D]: the weighted sum of each token's rows plus `own_TD`, summed in float32."""
    num_tokens, top_k = weights_TK.shape
    size = source_MD.shape[1]
    out = torch.empty((num_tokens, size), dtype=source_MD.dtype, device=source_MD.device)
    _gather[(num_tokens, triton.cdiv(size, COLUMNS))](
        source_MD,
        alignment.rows_TK,
        weights_TK.contiguous(),
        out if own_TD is None else own_TD.contiguous(),
        out,
        size,
        K=top_k,
        C=COLUMNS,
        HAS_OWN=own_TD is not None,
    )
    return out
