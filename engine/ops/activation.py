"""The gated activation between the two products of a feed-forward network."""

from typing import TYPE_CHECKING, Final

import torch.nn.functional as F
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.reference import quantize_rows
from engine.ops.op import Op, Target, late

if TYPE_CHECKING:
    from engine.formats.triton_gemm import byte_quant
    from engine.ops import activation_kernel
else:
    byte_quant = late("engine.formats.triton_gemm.byte_quant")
    activation_kernel = late("engine.ops.activation_kernel")


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [..., 2F], gate before up: [..., F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


SILU_AND_MUL: Final = Op(reference=silu_and_mul)


def silu_and_mul_fp8(gate_up_TF: Tensor) -> Fp8Rows:
    """Quantise silu(gate) * up, made in float32, of [T, 2F]: [T, F]; F is a multiple of 128."""
    return quantize_rows(silu_and_mul(gate_up_TF.float()))


SILU_AND_MUL_FP8: Final = (
    Op(reference=silu_and_mul_fp8, is_sized=True)
    .on(Target.TRITON, lambda: activation_kernel.silu_and_mul_fp8)
    .on(Target.NO_E4M3, lambda: byte_quant.silu_and_mul_fp8)
)
