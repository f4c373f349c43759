"""The operations on the masked layout in plain PyTorch; see `engine.kernels.masked_rows`."""

import torch
from torch import Tensor

from engine.formats.fp8_rows import GROUP, Fp8Rows
from engine.invariants import require
from engine.kernels.masked_rows import MaskedPlaces, MaskedRows, guess_rows, require_room
from engine.kernels.reference import fp8_linear, quantize_rows, silu_and_mul


def empty_masked(
    num_experts: int, max_rows: int, num_columns: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return uninitialised data and scales as `MaskedRows` has them."""
    require(
        max_rows % 4 == num_columns % GROUP == 0,
        "rows and columns",
        (max_rows, num_columns),
        f"multiples of 4 and of {GROUP} are wanted",
    )
    data = torch.empty(
        (num_experts, max_rows, num_columns), dtype=torch.float8_e4m3fn, device=device
    )
    scale = torch.empty(
        (num_experts, num_columns // GROUP, max_rows), dtype=torch.float32, device=device
    )
    return data, scale.transpose(1, 2)


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


def masked_fp8_mlp(
    rows: MaskedRows, w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]
) -> Tensor:
    """Run each expert's gated MLP over its rows in use.

    Args:
        rows: [L, M, D].
        w13: [L, 2F, D] e4m3, gate over up, and [L, 2F / 128, D / 128] float32.
        w2: [L, D, F] e4m3 and [L, D / 128, F / 128] float32.

    Returns:
        [L, M, D] bfloat16; rows that are not in use hold anything.
    """
    out = torch.empty(rows.data_LMD.shape, dtype=torch.bfloat16, device=rows.data_LMD.device)
    for expert, num_rows in enumerate(rows.num_rows_L.tolist()):
        mine = Fp8Rows(
            data_TK=rows.data_LMD[expert, :num_rows], scale_TG=rows.scale_LMG[expert, :num_rows]
        )
        gate_up = fp8_linear(mine, w13[0][expert], w13[1][expert])
        hidden = quantize_rows(silu_and_mul(gate_up.float()))
        out[expert, :num_rows] = fp8_linear(hidden, w2[0][expert], w2[1][expert])
    return out
