"""Rows of tokens to the masked layout of grouped GEMMs; see `engine.kernels.masked_rows`.

The way back is `unpermute_rows`. Letters: L experts of this rank, M rows of each, T tokens,
K experts per token.
"""

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.masked_rows import (
    MaskedPlaces,
    MaskedRows,
    empty_masked,
    guess_rows,
    require_room,
)
from engine.ops.op import Op, Target, late

if TYPE_CHECKING:
    from engine.ops import masked_kernel
else:
    masked_kernel = late("engine.ops.masked_kernel")


def moe_align_masked(
    topk_ids_TK: Tensor,
    first: int,
    num_experts: int,
    max_rows: int,
    *,
    expected_rows: int | None = None,
) -> MaskedPlaces:
    """Choose the row of every (token, expert) pair, without a host read.

    Args:
        topk_ids_TK: [T, K] int64 physical experts, none twice in a row, T at most M; those outside
            of [first, first + num_experts), -1 among them, get no row. Nor do pairs beyond an
            expert's M rows, which only rows that break the rule have.
        first: lowest expert of this rank.
        num_experts: L.
        max_rows: M; see `max_masked_rows`.
        expected_rows: see `MaskedRows`; by default as if all pairs were this rank's.
    """
    num_tokens, top_k = topk_ids_TK.shape
    require_room(num_tokens, max_rows)
    local = topk_ids_TK.flatten() - first
    experts = torch.arange(num_experts, device=local.device)
    is_mine = (local.unsqueeze(1) == experts).int()  # [T * K, L]
    rank = is_mine.cumsum(0, dtype=torch.int32) - 1
    is_mine *= rank < max_rows
    rows = ((rank + experts * max_rows) * is_mine).sum(1) - (1 - is_mine.sum(1))
    return MaskedPlaces(
        rows_TK=rows.int().view(num_tokens, top_k),
        num_rows_L=is_mine.sum(0, dtype=torch.int32),
        max_rows=max_rows,
        expected_rows=expected_rows or guess_rows(num_tokens, top_k, num_experts),
    )


MOE_ALIGN_MASKED: Final = Op(reference=moe_align_masked).on(
    Target.TRITON, lambda: masked_kernel.moe_align_masked
)


def permute_masked_rows(rows: Fp8Rows, places: MaskedPlaces) -> MaskedRows:
    """Copy each token's row to all of its places; other rows are uninitialised."""
    num_experts = places.num_rows_L.shape[0]
    num_columns = rows.data_TK.shape[1]
    data, scale = empty_masked(num_experts, places.max_rows, num_columns, rows.data_TK.device)
    tokens, _ = (places.rows_TK >= 0).nonzero(as_tuple=True)
    targets = places.rows_TK[places.rows_TK >= 0].long()
    data.view(torch.uint8).flatten(0, 1)[targets] = rows.data_TK.view(torch.uint8)[tokens]
    scale[targets // places.max_rows, targets % places.max_rows] = rows.scale_TG[tokens]
    return MaskedRows(
        data_LMD=data,
        scale_LMG=scale,
        num_rows_L=places.num_rows_L,
        expected_rows=places.expected_rows,
    )


PERMUTE_MASKED_ROWS: Final = Op(reference=permute_masked_rows).on(
    Target.TRITON, lambda: masked_kernel.permute_masked_rows
)
