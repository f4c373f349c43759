"""Experts on the masked layout in plain PyTorch; see `engine.kernels.masked_rows`."""

import torch
from torch import Tensor

from engine.formats.fp8_rows import GROUP, Fp8Rows
from engine.invariants import require
from engine.kernels.masked_rows import MaskedRows
from engine.kernels.reference import fp8_linear, quantize_rows
from engine.ops.activation import silu_and_mul


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
