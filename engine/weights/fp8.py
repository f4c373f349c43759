"""Block FP8: weights as e4m3 numbers with one float32 scale per 128 x 128 block.

This is the number format of the DeepSeek-V3 checkpoint and nothing else: no file access, no
kernels, no activations. The key idea: a block is divided by `amax / 448`, so that its largest
magnitude lands on the largest finite e4m3 value, and the divisor is kept as `weight_scale_inv`
(the *inverse* of the scale that was applied, hence the name): `weight = e4m3 * scale_inv`.

Shape legend: M rows (output features), K columns (input features), P = ceil(M / 128),
Q = ceil(K / 128). Blocks at the lower and right edge may be partial; a partial block behaves as
if it were padded with zeros.
"""

from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 128
E4M3_MAX: Final = 448.0


def scale_shape(num_rows: int, num_columns: int, block: int = BLOCK) -> tuple[int, int]:
    """Return (P, Q), the shape of `weight_scale_inv` for a weight of M x K."""
    return -(-num_rows // block), -(-num_columns // block)


def quantize_block(weight_MK: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to e4m3 with one scale per block.

    Args:
        weight_MK: [M, K] floating point, any device, finite.
        block: edge of a square block.

    Returns:
        e4m3 [M, K] float8_e4m3fn and scale_inv [P, Q] float32; an all-zero block has scale 1.

    Raises:
        ValueError: the weight is not a matrix, or holds NaN or infinity.
    """
    _check_matrix(weight_MK)
    weight_MK = weight_MK.float()
    num_rows, num_columns = weight_MK.shape
    amax_PQ = _block_amax(weight_MK, block)
    if not bool(torch.isfinite(amax_PQ).all()):
        raise ValueError("weight holds NaN or infinity; FP8 cannot represent it: check its source")
    scale_inv_PQ = torch.where(amax_PQ > 0, amax_PQ / E4M3_MAX, torch.ones_like(amax_PQ))
    # A block of denormals would give a scale of zero and then 0 / 0.
    scale_inv_PQ = scale_inv_PQ.clamp_min(torch.finfo(torch.float32).tiny)
    scaled_MK = weight_MK / _spread(scale_inv_PQ, num_rows, num_columns, block)
    # Rounding of the division may exceed 448 by one ulp, and e4m3fn turns that into NaN.
    e4m3_MK = scaled_MK.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return e4m3_MK, scale_inv_PQ


def dequantize_block(weight_MK: Tensor, scale_inv_PQ: Tensor, block: int = BLOCK) -> Tensor:
    """Return float32 [M, K] = e4m3 x scale of its block.

    Args:
        weight_MK: [M, K] float8_e4m3fn.
        scale_inv_PQ: [P, Q] float32, on the same device.
        block: edge of a square block.

    Raises:
        ValueError: the weight is not a matrix, or the scales have another shape than P x Q.
    """
    _check_matrix(weight_MK)
    num_rows, num_columns = weight_MK.shape
    expected = scale_shape(num_rows, num_columns, block)
    if tuple(scale_inv_PQ.shape) != expected:
        raise ValueError(
            f"weight_scale_inv has shape {tuple(scale_inv_PQ.shape)}, but a weight of "
            f"{num_rows} x {num_columns} in blocks of {block} needs {expected}"
        )
    out_MK, scale_inv_PQ = weight_MK.float(), scale_inv_PQ.float()
    if num_rows % block or num_columns % block:
        return out_MK.mul_(_spread(scale_inv_PQ, num_rows, num_columns, block))
    # Whole blocks only: the scales broadcast over a view and are never spread out in memory.
    blocks = out_MK.view(num_rows // block, block, num_columns // block, block)
    blocks.mul_(scale_inv_PQ[:, None, :, None])
    return out_MK


def _check_matrix(weight: Tensor) -> None:
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"block FP8 needs a non-empty matrix, got shape {tuple(weight.shape)}")


def _block_amax(weight_MK: Tensor, block: int) -> Tensor:
    num_rows, num_columns = weight_MK.shape
    num_p, num_q = scale_shape(num_rows, num_columns, block)
    padding = (0, num_q * block - num_columns, 0, num_p * block - num_rows)
    padded = torch.nn.functional.pad(weight_MK.abs(), padding)
    return padded.view(num_p, block, num_q, block).amax(dim=(1, 3))


def _spread(scale_inv_PQ: Tensor, num_rows: int, num_columns: int, block: int) -> Tensor:
    """Repeat each scale over its block: [P, Q] -> [M, K]."""
    rows = scale_inv_PQ.repeat_interleave(block, dim=0)[:num_rows]
    return rows.repeat_interleave(block, dim=1)[:, :num_columns]
