"""Steps on the masked layout of grouped GEMMs: choose rows, and activate between the products.

Made for CUDA graphs: grids and shapes follow from the host's arguments alone, and how many rows are
in use is read on the device. The key idea: an expert is a program (or a few), which walks over what
the device says there is, so that room for the worst routing costs memory and no time.
"""

# Triton compiles these functions itself; their arguments have no Python types.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: no-warn-return-any

import torch
import triton.language as tl
from torch import Tensor

from engine.formats.fp8_rows import GROUP, Fp8Rows
from engine.invariants import require
from engine.kernels.fused.launch import ceil_div, launched, next_power_of_2
from engine.kernels.fused.quant import _quantize_tile
from engine.kernels.masked_rows import (
    MaskedPlaces,
    MaskedRows,
    empty_masked,
    guess_rows,
    require_room,
)
from engine.ops.permute_kernel import permute_into

PAIRS = 1024
"""Pairs (token, expert) that a program of `moe_align_masked` looks at in one go."""

ROWS = 8
"""Rows of a tile of the activation."""

SPLITS = 6, 16
"""Programs that share an expert's rows: at least, as routing is uneven, and at most."""


@launched("first")
def _mask(ids, rows, num_rows, num_pairs, num_experts, max_rows, first, B: tl.constexpr):
    expert = tl.program_id(0)
    count = tl.zeros([1], tl.int32)
    for start in range(0, num_pairs, B):
        pairs = start + tl.arange(0, B)
        is_pair = pairs < num_pairs
        local = tl.load(ids + pairs, mask=is_pair, other=-1).to(tl.int32) - first
        is_mine = (local == expert) & (expert < num_experts) & is_pair
        found = is_mine.to(tl.int32)
        place = count + tl.cumsum(found, axis=0) - 1
        # Beyond an expert's room there is the next one's: such a pair gets no row.
        row = tl.where(place < max_rows, expert * max_rows + place, -1)
        # The last program is no expert's: it marks the pairs of other ranks.
        is_foreign = ((local < 0) | (local >= num_experts)) & (expert == num_experts) & is_pair
        tl.store(rows + pairs, tl.where(is_foreign, -1, row), mask=is_mine | is_foreign)
        count += tl.sum(found, axis=0)
    index = expert + tl.arange(0, 1)
    tl.store(num_rows + index, tl.minimum(count, max_rows), mask=index < num_experts)


@launched("num_splits")
def _silu_and_mul(
    gate_up, counts, data, scale, max_rows, width, num_groups, num_splits, R: tl.constexpr
):
    group = tl.program_id(0)
    split = tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64)
    num_rows = tl.load(counts + expert)
    columns = group * 128 + tl.arange(0, 128)
    gate_up += expert * max_rows * (2 * width)
    data += expert * max_rows * width
    scale += (expert * num_groups + group) * max_rows
    for start in range(split * R, num_rows, num_splits * R):
        rows = start + tl.arange(0, R)
        mask = (rows < num_rows)[:, None]
        wide = rows.to(tl.int64)[:, None]
        source = gate_up + wide * (2 * width) + columns[None, :]
        gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
        quantized, scales = _quantize_tile(gate * tl.sigmoid(gate) * up)
        tl.store(data + wide * width + columns[None, :], quantized, mask=mask)
        tl.store(scale + rows, scales, mask=rows < num_rows)


def moe_align_masked(
    topk_ids_TK: Tensor,
    first: int,
    num_experts: int,
    max_rows: int,
    *,
    expected_rows: int | None = None,
) -> MaskedPlaces:
    """Choose the row of every (token, expert) pair; see `masked`."""
    num_tokens, top_k = topk_ids_TK.shape
    require_room(num_tokens, max_rows)
    ids = topk_ids_TK.contiguous()
    rows = torch.empty((num_tokens, top_k), dtype=torch.int32, device=ids.device)
    num_rows = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    block = min(PAIRS, max(128, next_power_of_2(max(1, ids.numel()))))
    _mask(
        (num_experts + 1,),
        (ids, rows, num_rows),
        (ids.numel(), num_experts, max_rows),
        (first,),
        (block,),
    )
    return MaskedPlaces(
        rows_TK=rows,
        num_rows_L=num_rows,
        max_rows=max_rows,
        expected_rows=expected_rows or guess_rows(num_tokens, top_k, num_experts),
    )


def permute_masked_rows(rows: Fp8Rows, places: MaskedPlaces) -> MaskedRows:
    """Copy each token's row to all of its places; other rows are uninitialised."""
    num_experts, size = places.num_rows_L.shape[0], rows.data_TK.shape[1]
    data, scale = empty_masked(num_experts, places.max_rows, size, rows.data_TK.device)
    permute_into(data, scale, rows, places.rows_TK)
    return MaskedRows(
        data_LMD=data,
        scale_LMG=scale,
        num_rows_L=places.num_rows_L,
        expected_rows=places.expected_rows,
    )


def masked_silu_and_mul_fp8(gate_up_LMF: Tensor, like: MaskedRows) -> MaskedRows:
    """Quantise silu(gate) * up of the rows in use; the others are left uninitialised.

    Args:
        gate_up_LMF: [L, M, 2F] contiguous, gate before up; F is a multiple of 128.
        like: whose rows they are.
    """
    num_experts, max_rows, double = gate_up_LMF.shape
    num_groups = double // 2 // GROUP
    require(
        gate_up_LMF.is_contiguous()
        and double == 2 * GROUP * num_groups
        and like.num_rows_L.shape == (num_experts,),
        "gate and up",
        (tuple(gate_up_LMF.shape), gate_up_LMF.stride()),
        f"contiguous [L, M, 2F] of L = {like.num_rows_L.shape[0]} experts are wanted, F in groups",
    )
    data, scale = empty_masked(num_experts, max_rows, double // 2, gate_up_LMF.device)
    wanted = ceil_div(min(like.expected_rows, max_rows), ROWS)
    least, most = SPLITS
    num_splits = min(most, max(least, wanted))
    _silu_and_mul(
        (num_groups, num_splits, num_experts),
        (gate_up_LMF, like.num_rows_L, data, scale),
        (max_rows, double // 2, num_groups),
        (num_splits,),
        (ROWS,),
        num_warps=2,
    )
    return MaskedRows(
        data_LMD=data,
        scale_LMG=scale,
        num_rows_L=like.num_rows_L,
        expected_rows=like.expected_rows,
    )
