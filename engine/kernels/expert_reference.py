"""Experts in FP8 in plain PyTorch, over rows of both layouts.

See `engine.kernels.alignment` for the aligned one, `engine.kernels.masked_rows` for the masked one.
"""

import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.alignment import Overflow
from engine.kernels.masked_rows import MaskedRows
from engine.kernels.reference import fp8_linear, quantize_rows
from engine.ops.activation import silu_and_mul


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
