"""Root-mean-square norm, with what comes before it (a residual) and after it (quantisation).

Bound by memory: a program holds one row in registers from its first read to its last write.
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

FEW_ROWS = 256
"""Rows that are normed by twice as many warps each: faster up to there, measured on an H200."""


@launched("row_stride", "group_stride")
def _rms_norm(
    x, delta, total, weight, out, data, scale, x_stride, data_stride, size, eps, row_stride,
    group_stride, G: tl.constexpr, W: tl.constexpr,
    HAS_DELTA: tl.constexpr, HAS_OUT: tl.constexpr, HAS_FP8: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, G)
    columns = groups[:, None] * W + tl.arange(0, W)[None, :]
    mask = columns < size
    dtype = x.dtype.element_ty
    # All loads before the sum, which everybody waits for.
    gain = tl.load(weight + columns, mask=mask, other=0.0)
    wide = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        wide += tl.load(delta + row * size + columns, mask=mask, other=0.0).to(tl.float32)
        values = wide.to(dtype)
        tl.store(total + row * size + columns, values, mask=mask)
        wide = values.to(tl.float32)
    mean = tl.sum(tl.sum(wide * wide, axis=1), axis=0) / size
    # Rounded before the weight, as the reference does.
    normed = (wide * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32)
    normed = (normed * gain.to(tl.float32)).to(dtype)
    if HAS_OUT:
        tl.store(out + row * size + columns, normed, mask=mask)
    if HAS_FP8:
        quantized, scales = _quantize_tile(normed.to(tl.float32))
        tl.store(data + row * data_stride + columns, quantized, mask=mask)
        place = scale + groups.to(tl.int64) * group_stride + row * row_stride
        tl.store(place, scales, mask=groups * W < size)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return the norm of [T, D] with unit stride along D, contiguous."""
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    _launch(x_TD, weight_D, eps, out=out)
    return out


def add_rms_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + delta and its norm, both contiguous [T, D]."""
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    total = torch.empty_like(out)
    _launch(x_TD, weight_D, eps, delta=delta_TD.contiguous(), total=total, out=out)
    return total, out


def add_rms_norm_fp8(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    *,
    with_plain: bool,
    out: Fp8Rows | None = None,
) -> tuple[Tensor, Tensor | None, Fp8Rows]:
    """Return x + delta, its norm if wanted, and its norm quantised, in one pass.

    D is a multiple of 128; without a delta the first result is x itself.
    """
    rows = Fp8Rows.empty(x_TD.shape[0], x_TD.shape[1], x_TD.device) if out is None else out
    plain = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device) if with_plain else None
    if delta_TD is None:
        _launch(x_TD, weight_D, eps, out=plain, fp8=rows)
        return x_TD, plain, rows
    total = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    _launch(x_TD, weight_D, eps, delta=delta_TD.contiguous(), total=total, out=plain, fp8=rows)
    return total, plain, rows


def _launch(
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    *,
    delta: Tensor | None = None,
    total: Tensor | None = None,
    out: Tensor | None = None,
    fp8: Fp8Rows | None = None,
) -> None:
    num_rows, size = x_TD.shape
    require(x_TD.stride(1) == 1, "rows to be normed", x_TD.stride(), "no gaps are wanted")
    parts = delta, None if fp8 is None else fp8.data_TK
    sizes = [tuple(part.shape) for part in parts if part is not None]
    require(
        weight_D.shape == (size,) and all(part == x_TD.shape for part in sizes),
        "rows to be normed",
        (tuple(x_TD.shape), tuple(weight_D.shape), sizes),
        "weight, residual and room for the result of the same size are wanted",
    )
    if not num_rows:
        return
    absent = x_TD
    _rms_norm(
        (num_rows,),
        (
            x_TD,
            absent if delta is None else delta,
            absent if total is None else total,
            weight_D,
            absent if out is None else out,
            absent if fp8 is None else fp8.data_TK,
            absent if fp8 is None else fp8.scale_TG,
        ),
        (x_TD.stride(0), 0 if fp8 is None else fp8.data_TK.stride(0), size, eps),
        (0, 0) if fp8 is None else fp8.scale_TG.stride(),
        (
            next_power_of_2(ceil_div(size, GROUP)),
            GROUP,
            delta is not None,
            out is not None,
            fp8 is not None,
        ),
        num_warps=_warps(num_rows, size),
    )


def _warps(num_rows: int, size: int) -> int:
    """Return the warps of a row: many where few rows leave the GPU waiting for memory."""
    if size <= 2048:
        return 4
    return 16 if num_rows <= FEW_ROWS else 8
