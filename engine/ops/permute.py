"""Rows of tokens to and from the contiguous layout of GEMMs; see `engine.kernels.alignment`.

Legend: T tokens, D hidden size, E experts, K experts per token, M expert rows, C capacity.
"""

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.alignment import (
    ROW_BLOCK,
    Alignment,
    OverflowPlaces,
    RowCounts,
    max_aligned_rows,
)
from engine.kernels.masked_rows import MaskedPlaces
from engine.kernels.widths import check_capacity, check_unpermute
from engine.ops.op import Op, Target, Work, late, moved_bytes

if TYPE_CHECKING:
    from engine.ops import permute_kernel
else:
    permute_kernel = late("engine.ops.permute_kernel")


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


COUNT_ROWS: Final = Op(reference=count_rows).on(Target.TRITON, lambda: permute_kernel.count_rows)


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


MOE_ALIGN_BLOCK_SIZE: Final = Op(reference=moe_align_block_size).on(
    Target.TRITON, lambda: permute_kernel.moe_align_block_size
)


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


def _copies(out: Fp8Rows, rows: Fp8Rows, alignment: Alignment) -> Work:
    """Count the rows in use, of all that are laid out."""
    pairs = int((alignment.rows_TK >= 0).sum())
    unused = (pairs - out.num_rows) * out.data_TK.shape[1]
    return Work(moved_bytes(out, rows) + unused)


PERMUTE_ROWS: Final = Op(reference=permute_rows, work=_copies).on(
    Target.TRITON, lambda: permute_kernel.permute_rows
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


def _sums(
    out_TD: Tensor,
    source_MD: Tensor,
    places: Alignment | MaskedPlaces,
    weights_TK: Tensor,
    own_TD: Tensor | None,
) -> Work:
    """Count the rows in use, of all that are laid out."""
    pairs = int((places.rows_TK >= 0).sum())
    unused = (pairs - source_MD.shape[0]) * source_MD.shape[1] * source_MD.element_size()
    return Work(moved_bytes(out_TD, source_MD, weights_TK, own_TD) + unused)


UNPERMUTE_ROWS: Final = Op(reference=unpermute_rows, work=_sums).on(
    Target.TRITON, lambda: permute_kernel.unpermute_rows
)
