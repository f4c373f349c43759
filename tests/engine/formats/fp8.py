"""Block FP8 of a set of kernels, for tests that call it by hand."""

from typing import Any

from torch import Tensor

from engine.formats.base import NumberFormat
from engine.formats.fp8_rows import Fp8Rows


def fp8_of(kernels: Any) -> NumberFormat:
    """Return the format; `kernels` have it."""
    (fp8,) = kernels.formats.quantized
    assert fp8.rows is not None
    return fp8


def quantize(kernels: Any, x_TK: Tensor, out: Fp8Rows | None = None) -> Fp8Rows:
    """Quantise rows as the kernels do."""
    codec = fp8_of(kernels).rows
    assert codec is not None
    return codec.quantize_rows(x_TK, out)
