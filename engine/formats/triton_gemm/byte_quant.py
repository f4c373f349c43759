"""Quantise rows to e4m3 on GPUs that do not know the format: the bits are made by hand.

The counterpart of `engine.kernels.fused.quant`, whose kernels need conversions that Ampere lacks.
Rounding is to the nearest, ties to even, as the hardware does. A group that holds NaN gets NaN as
its scale, because the product of such GPUs reads e4m3's own NaN as a number (see `product`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.formats.fp8_rows import GROUP, MIN_AMAX, Fp8Rows
from engine.formats.triton_gemm.product import ALIGNED, MASKED, PLAIN
from engine.invariants import require
from engine.kernels.masked_rows import MaskedRows, empty_masked

BLOCK_T = 32
E4M3_MAX = tl.constexpr(448.0)
LEAST_AMAX = tl.constexpr(MIN_AMAX)


@triton.jit
def _encode(x):
    """Return the e4m3 bits, as uint8, of float32 numbers of at most 448."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # From 2^-6 on: cut 20 of 23 bits, rounding half to even, and shift the exponent's bias
    # from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below: whole multiples of 2^-9, the unit in the last place of numbers from 2^14 to 2^15.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000
    value = tl.where(magnitude < 0x3C800000, small, normal)
    return (value | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _quantize_tile(values):
    """Return the bits [T, 128] and the scales [T] of float32 [T, 128]."""
    scales = tl.maximum(tl.max(tl.abs(values), axis=1), LEAST_AMAX) / E4M3_MAX
    bits = _encode(tl.clamp(values / scales[:, None], -E4M3_MAX, E4M3_MAX))
    num_nan = tl.sum((values != values).to(tl.int32), axis=1)
    return bits, tl.where(num_nan > 0, float("nan"), scales)


@triton.jit
def _quantize(
    x, x_group, x_row, data, data_group, data_row, scale, scale_group, scale_row, scale_column,
    experts, num_rows, width,
    B: tl.constexpr, LAYOUT: tl.constexpr, ACTIVATE: tl.constexpr,
):  # fmt: skip
    """Quantise a tile of one group of 128 columns; `experts` is that of `product.multiply`."""
    first = tl.program_id(0) * B
    column = tl.program_id(1).to(tl.int64)
    group = tl.program_id(2).to(tl.int64)
    if LAYOUT == ALIGNED and tl.load(experts + first) < 0:
        return
    if LAYOUT == MASKED and first >= tl.load(experts + group):
        return
    rows = (first + tl.arange(0, B)).to(tl.int64)
    columns = column * 128 + tl.arange(0, 128)[None, :]
    mask = (rows < num_rows)[:, None]
    source = x + group * x_group + rows[:, None] * x_row + columns
    values = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATE:
        up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
        values = values * tl.sigmoid(values) * up
    bits, scales = _quantize_tile(values)
    tl.store(data + group * data_group + rows[:, None] * data_row + columns, bits, mask=mask)
    place = scale + group * scale_group + rows * scale_row + column * scale_column
    tl.store(place, scales, mask=rows < num_rows)


def quantize_rows(x_TK: Tensor, out: Fp8Rows | None = None) -> Fp8Rows:
    """Quantise [T, K] with unit stride along K; K is a multiple of 128; `out` of any layout."""
    num_rows, num_columns = x_TK.shape
    if out is None:
        out = Fp8Rows.empty(num_rows, num_columns, x_TK.device)
    _run(
        x_TK.unsqueeze(0), (out.data_TK.unsqueeze(0), out.scale_TG.unsqueeze(0)), layout=PLAIN.value
    )
    return out


def silu_and_mul_fp8(gate_up_TF: Tensor, expert_T: Tensor | None = None) -> Fp8Rows:
    """Quantise silu(gate) * up of [T, 2F]; F is a multiple of 128.

    Args:
        gate_up_TF: [T, 2F], gate before up, unit stride along the columns.
        expert_T: [T] int32, the expert of each row in blocks of 128 rows; blocks of -1 are left
            uninitialised.
    """
    out = Fp8Rows.empty(gate_up_TF.shape[0], gate_up_TF.shape[1] // 2, gate_up_TF.device)
    _run(
        gate_up_TF.unsqueeze(0),
        (out.data_TK.unsqueeze(0), out.scale_TG.unsqueeze(0)),
        layout=(PLAIN if expert_T is None else ALIGNED).value,
        experts=expert_T,
        activate=True,
    )
    return out


def masked_silu_and_mul_fp8(gate_up_LMF: Tensor, like: MaskedRows) -> MaskedRows:
    """Quantise silu(gate) * up of the rows in use of [L, M, 2F]; others are left uninitialised."""
    num_experts, max_rows, double = gate_up_LMF.shape
    data, scale = empty_masked(num_experts, max_rows, double // 2, gate_up_LMF.device)
    _run(gate_up_LMF, (data, scale), layout=MASKED.value, experts=like.num_rows_L, activate=True)
    return MaskedRows(
        data_LMD=data,
        scale_LMG=scale,
        num_rows_L=like.num_rows_L,
        expected_rows=like.expected_rows,
    )


def _run(
    x: Tensor,
    out: tuple[Tensor, Tensor],
    *,
    layout: int,
    experts: Tensor | None = None,
    activate: bool = False,
) -> None:
    """Quantise [G, R, K] (or [G, R, 2K] to be activated) into data [G, R, K] and its scales."""
    data, scale = out
    num_groups, num_rows, width = data.shape
    wanted = (num_groups, num_rows, 2 * width if activate else width)
    require(
        x.shape == wanted and x.stride(2) == 1 and width % GROUP == 0,
        "rows to be quantised",
        (tuple(x.shape), x.stride()),
        f"{wanted} without gaps, in groups of {GROUP}, are wanted",
    )
    if not num_rows:
        return
    _quantize[(triton.cdiv(num_rows, BLOCK_T), width // GROUP, num_groups)](
        x, x.stride(0), x.stride(1),
        data.view(torch.uint8), data.stride(0), data.stride(1),
        scale, scale.stride(0), scale.stride(1), scale.stride(2),
        scale if experts is None else experts, num_rows, width,
        B=BLOCK_T, LAYOUT=layout, ACTIVATE=activate,
    )  # fmt: skip
