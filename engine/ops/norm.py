"""Root-mean-square norm, with what comes before it (a residual) and after it (quantisation)."""

from typing import TYPE_CHECKING, Final

import torch.nn.functional as F
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.reference import quantize_rows
from engine.ops.op import Op, Target, late

if TYPE_CHECKING:
    from engine.formats.triton_gemm import byte_quant
    from engine.ops import norm_kernel
else:
    byte_quant = late("engine.formats.triton_gemm.byte_quant")
    norm_kernel = late("engine.ops.norm_kernel")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, in the dtype of x."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight


def _rms_norm_of_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Leave what is not [T, D] to the reference."""
    return norm_kernel.rms_norm(x, weight, eps) if x.dim() == 2 else rms_norm(x, weight, eps)


RMS_NORM: Final = Op(reference=rms_norm, is_sized=True).on(Target.TRITON, lambda: _rms_norm_of_rows)


def add_rms_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + delta and its norm, both [T, D]."""
    total_TD = x_TD + delta_TD
    return total_TD, rms_norm(total_TD, weight_D, eps)


ADD_RMS_NORM: Final = Op(reference=add_rms_norm).on(Target.TRITON, lambda: norm_kernel.add_rms_norm)


def add_rms_norm_fp8(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    *,
    with_plain: bool,
    out: Fp8Rows | None = None,
) -> tuple[Tensor, Tensor | None, Fp8Rows]:
    """Add a residual, norm and quantise.

    Args:
        x_TD: [T, D].
        delta_TD: [T, D] to be added, or None.
        weight_D: of the norm.
        eps: of the norm.
        with_plain: whether the norm in the dtype of x is wanted too.
        out: for the quantised rows, of any layout.

    Returns:
        x + delta (x itself without a delta), its norm or None, and the norm quantised.
    """
    sum_TD = x_TD if delta_TD is None else x_TD + delta_TD
    normed_TD = rms_norm(sum_TD, weight_D, eps)
    return sum_TD, normed_TD if with_plain else None, quantize_rows(normed_TD, out)


def _add_rms_norm_by_hand(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    *,
    with_plain: bool,
    out: Fp8Rows | None = None,
) -> tuple[Tensor, Tensor | None, Fp8Rows]:
    """Quantise apart, with bits made by hand."""
    if delta_TD is None:
        total, normed = x_TD, _rms_norm_of_rows(x_TD, weight_D, eps)
    else:
        total, normed = norm_kernel.add_rms_norm(x_TD, delta_TD, weight_D, eps)
    return total, normed if with_plain else None, byte_quant.quantize_rows(normed, out)


ADD_RMS_NORM_FP8: Final = (
    Op(reference=add_rms_norm_fp8)
    .on(Target.TRITON, lambda: norm_kernel.add_rms_norm_fp8)
    .on(Target.NO_E4M3, lambda: _add_rms_norm_by_hand)
)
