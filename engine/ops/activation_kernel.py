"""Quantise rows after the gated activation.

Bound by memory: every element is read once and written once. A program takes 32 rows of one group
of 128, so that the scales it writes are one run of the column-major scales.
"""

# Triton compiles these functions itself; their arguments have no Python types.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: no-warn-return-any

import triton.language as tl
from torch import Tensor

from engine.formats.fp8_rows import GROUP, Fp8Rows
from engine.invariants import require
from engine.kernels.fused.launch import ceil_div, launched
from engine.kernels.fused.quant import BLOCK_T, _quantize_tile


@launched("scale_stride", "num_rows")
def _silu_and_mul(
    gate_up, expert, data, scale, width, scale_stride, num_rows,
    B: tl.constexpr, HAS_EXPERT: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * B
    # Blocks of 128 rows that belong to no expert hold nothing.
    if HAS_EXPERT and tl.load(expert + first) < 0:
        return
    rows = first + tl.arange(0, B)
    columns = group * 128 + tl.arange(0, 128)
    mask = (rows < num_rows)[:, None]
    wide = rows.to(tl.int64)[:, None]
    source = gate_up + wide * (2 * width) + columns[None, :]
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    quantized, scales = _quantize_tile(gate * tl.sigmoid(gate) * up)
    tl.store(data + wide * width + columns[None, :], quantized, mask=mask)
    tl.store(scale + group * scale_stride + rows, scales, mask=rows < num_rows)


def silu_and_mul_fp8(gate_up_TF: Tensor, expert_T: Tensor | None = None) -> Fp8Rows:
    """Quantise silu(gate) * up of contiguous [T, 2F]; F is a multiple of 128.

    Args:
        gate_up_TF: [T, 2F], gate before up.
        expert_T: [T] int32, the expert of each row in blocks of 128 rows; blocks of -1 are left
            uninitialised.
    """
    num_rows, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    require(
        gate_up_TF.is_contiguous() and (expert_T is None or expert_T.shape == (num_rows,)),
        "gate and up",
        (tuple(gate_up_TF.shape), gate_up_TF.stride()),
        "contiguous rows are wanted, and an expert for each if any",
    )
    out = Fp8Rows.empty(num_rows, width, gate_up_TF.device)
    if num_rows:
        _silu_and_mul(
            (ceil_div(num_rows, BLOCK_T), width // GROUP),
            (
                gate_up_TF,
                gate_up_TF if expert_T is None else expert_T,
                out.data_TK,
                out.scale_TG,
            ),
            (width,),
            (out.scale_TG.stride(1), num_rows),
            (BLOCK_T, expert_T is not None),
        )
    return out
