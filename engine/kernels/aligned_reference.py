"""The operations on the contiguous layout in plain PyTorch; see `engine.kernels.alignment`.

Legend: T tokens, D hidden size, E experts, K experts per token, F expert width, M expert rows.
"""

import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.alignment import (
    ROW_BLOCK,
    Alignment,
    Overflow,
    OverflowPlaces,
    RowCounts,
    max_aligned_rows,
)
from engine.kernels.masked_rows import MaskedPlaces
from engine.kernels.reference import fp8_linear, quantize_rows, silu_and_mul
from engine.kernels.widths import check_capacity, check_unpermute


def count_rows(topk_ids_TK: Tensor, first: int, num_experts: int) -> RowCounts:
    """Choose the row of every (token, expert) pair, and count how many rows there are.

    Args:
        topk_ids_TK: [T, K] int64 or int32 physical experts, unit stride along K; those outside of
            [first, first + num_experts) get no row.
        first: lowest expert of this rank.
        num_experts: experts of this rank.
    """
    ids = topk_ids_TK.flatten() - first
    rows = torch.full_like(ids, -1, dtype=torch.int32)
    ends = []
    start = 0
    for index in range(num_experts):
        pairs = (ids == index).nonzero().squeeze(1)
        places = torch.arange(start, start + len(pairs), dtype=torch.int32, device=ids.device)
        rows[pairs] = places
        start = -(-(start + len(pairs)) // ROW_BLOCK) * ROW_BLOCK
        ends.append(start)
    ends_E = torch.tensor(ends, dtype=torch.int32, device=ids.device)
    num_blocks = max_aligned_rows(len(ids), num_experts) // ROW_BLOCK
    blocks = torch.arange(num_blocks, dtype=torch.int32, device=ids.device) * ROW_BLOCK
    expert = torch.searchsorted(ends_E, blocks, right=True, out_int32=True)
    expert = expert.masked_fill(expert == num_experts, -1)
    return RowCounts(
        rows_TK=rows.view(topk_ids_TK.shape),
        ends_E=ends_E,
        expert_M=expert.repeat_interleave(ROW_BLOCK),
    )


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
    counts = count_rows(topk_ids_TK, first, num_experts)
    most = counts.expert_M.shape[0]
    capacity = most if capacity is None else capacity
    check_capacity(capacity)
    unused_M = counts.expert_M.new_full((max(capacity - most, 0),), -1)
    overflow = None
    if capacity < most:
        rows = counts.rows_TK.flatten().long()
        tokens = torch.arange(len(rows), device=rows.device) // topk_ids_TK.shape[1]
        token_V = torch.full((most - capacity,), -1, dtype=torch.int32, device=rows.device)
        token_V[rows[rows >= capacity] - capacity] = tokens[rows >= capacity].int()
        overflow = OverflowPlaces(capacity=capacity, ends_E=counts.ends_E, token_V=token_V)
    return Alignment(
        rows_TK=counts.rows_TK,
        expert_M=torch.cat((counts.expert_M, unused_M)),
        overflow=overflow,
    )


def unpermute_rows(
    source_MD: Tensor,
    places: Alignment | MaskedPlaces,
    weights_TK: Tensor,
    own_TD: Tensor | None,
) -> Tensor:
    """Return [T, D]: the weighted sum of each token's rows plus `own_TD`, summed in float32."""
    check_unpermute(source_MD, places, weights_TK, own_TD)
    rows_TK = places.rows_TK.long()
    parts_TKD = source_MD.new_zeros((*rows_TK.shape, source_MD.shape[1]), dtype=torch.float32)
    is_here = rows_TK >= 0
    parts_TKD[is_here] = source_MD[rows_TK[is_here]].float()
    # Weights of pairs without a row may be anything, NaN included.
    weights_TK = weights_TK.masked_fill(~is_here, 0.0)
    out_TD = (parts_TKD * weights_TK.unsqueeze(-1)).sum(dim=1)
    return (out_TD if own_TD is None else out_TD + own_TD.float()).to(source_MD.dtype)


def permute_rows(rows: Fp8Rows, alignment: Alignment) -> Fp8Rows:
    """Copy each token's row to its places before the capacity; other rows are uninitialised.

    Returns:
        [C, D], C being the capacity.
    """
    out = Fp8Rows.empty(alignment.capacity, rows.data_TK.shape[1], rows.data_TK.device)
    num_tokens, top_k = alignment.rows_TK.shape
    places = alignment.rows_TK.flatten().long()
    tokens = torch.arange(num_tokens, device=places.device).repeat_interleave(top_k)
    is_here = (places >= 0) & (places < alignment.capacity)
    tokens, places = tokens[is_here], places[is_here]
    out.data_TK.view(torch.uint8)[places] = rows.data_TK.view(torch.uint8)[tokens]
    out.scale_TG[places] = rows.scale_TG[tokens]
    return out


def with_overflow(rows: Fp8Rows, overflow: Overflow | None) -> Fp8Rows:
    """Return all rows, [M, D], before and behind the capacity; those without a token hold any."""
    if overflow is None:
        return rows
    source, tokens = overflow.source, overflow.places.token_V.long()
    tokens = tokens.clamp(0, source.num_rows - 1)
    behind = source.data_TK.view(torch.uint8)[tokens]
    data = torch.cat((rows.data_TK.view(torch.uint8), behind))
    scales = torch.cat((rows.scale_TG, source.scale_TG[tokens]))
    return Fp8Rows(data_TK=data.view(torch.float8_e4m3fn), scale_TG=scales)


def grouped_fp8_mlp(
    rows: Fp8Rows,
    expert_M: Tensor,
    w13: tuple[Tensor, Tensor],
    w2: tuple[Tensor, Tensor],
    overflow: Overflow | None = None,
) -> Tensor:
    """Run each expert's gated MLP over its aligned rows.

    Args:
        rows: [C, D] in the layout of `Alignment`, before its capacity.
        expert_M: [M] int32; rows of -1 are left uninitialised.
        w13: [E, 2F, D] e4m3, gate over up, and [E, 2F / 128, D / 128] float32.
        w2: [E, D, F] e4m3 and [E, D / 128, F / 128] float32.
        overflow: the rows behind the capacity; None where C is M.

    Returns:
        [M, D] bfloat16.
    """
    rows = with_overflow(rows, overflow)
    size = rows.data_TK.shape
    out_MD = torch.empty(size, dtype=torch.bfloat16, device=expert_M.device)
    for expert in sorted(set(expert_M.tolist())):
        if expert >= 0:
            mine = expert_M == expert
            part = Fp8Rows(data_TK=rows.data_TK.view(torch.uint8)[mine].view(torch.float8_e4m3fn),
                           scale_TG=rows.scale_TG[mine])  # fmt: skip
            gate_up = fp8_linear(part, w13[0][expert], w13[1][expert])
            hidden = quantize_rows(silu_and_mul(gate_up.float()))
            out_MD[mine] = fp8_linear(hidden, w2[0][expert], w2[1][expert])
    return out_MD
