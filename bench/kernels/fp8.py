"""Block FP8 of a set of kernels, for measurements that call it by hand."""

from torch import Tensor

from bench.shapes import DEEPSEEK_V3
from engine.formats.base import NumberFormat
from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.base import Kernels


def fp8_of(kernels: Kernels) -> NumberFormat:
    """Return the format; the plain one if the kernels lack it."""
    return kernels.formats.of(DEEPSEEK_V3)


def quantize(kernels: Kernels, x_TK: Tensor) -> Fp8Rows:
    """Quantise rows, with kernels that have the format."""
    codec = fp8_of(kernels).rows
    assert codec is not None, kernels.name
    return codec.quantize_rows(x_TK)
