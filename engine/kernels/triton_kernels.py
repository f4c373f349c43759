"""Kernels for GPUs without DeepGEMM: our own FP8 products in Triton, the rest as on Hopper.

What multiplies and what attends differs from `HopperKernels`; every other operation is that
class's, by composition. A GPU that lacks the number format (Ampere) also quantises with kernels
that make its bits by hand; products widen them (see `triton_gemm.product`).
"""

from typing import Protocol

from torch import Tensor

from engine.attention import absorb_reference
from engine.formats.fp8_rows import Fp8Rows
from engine.formats.triton_gemm import byte_quant
from engine.formats.triton_gemm.gemm import TritonGemm
from engine.formats.triton_gemm.overflow import OverflowExperts
from engine.kernels.alignment import Overflow
from engine.kernels.hopper import HopperKernels, grouped_fp8_mlp
from engine.kernels.masked_rows import MaskedRows
from engine.kernels.parts import PageAttention, VarlenAttention
from engine.ops.op import Target
from engine.ops.table import resolve_ops


class _Quantised(Protocol):
    """The operations that write e4m3 numbers; see `Kernels`."""

    def quantize_rows(self, x_TK: Tensor, out: Fp8Rows | None = None) -> Fp8Rows: ...

    def grouped_fp8_mlp(
        self,
        rows: Fp8Rows,
        expert_M: Tensor,
        w13: tuple[Tensor, Tensor],
        w2: tuple[Tensor, Tensor],
        overflow: Overflow | None = None,
    ) -> Tensor: ...

    def masked_fp8_mlp(
        self, rows: MaskedRows, w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]
    ) -> Tensor: ...


class TritonKernels:
    """See `Kernels`."""

    has_fp8 = True
    max_attention_positions = HopperKernels.max_attention_positions
    absorb_queries = staticmethod(absorb_reference.absorb_queries)
    expand_values = staticmethod(absorb_reference.expand_values)

    def __init__(
        self, *, gemm: TritonGemm, attention: VarlenAttention, pages: PageAttention | None = None
    ) -> None:
        """Take what multiplies, which also says what the GPU can do, and what attends."""
        overflow = OverflowExperts(gemm.limits)
        shared = HopperKernels(gemm=gemm, overflow=overflow, attention=attention, pages=pages)
        own: _Quantised = _ByHand(gemm, overflow) if gemm.widens else shared
        self.name = f"triton on sm{gemm.limits.sm}"
        self.ops = resolve_ops(Target.NO_E4M3 if gemm.widens else Target.TRITON)

        self.quantize_rows = own.quantize_rows
        self.grouped_fp8_mlp = own.grouped_fp8_mlp
        self.masked_fp8_mlp = own.masked_fp8_mlp

        self.fp8_linear = shared.fp8_linear
        self.grouped_mlp = shared.grouped_mlp
        self.varlen_attention = shared.varlen_attention
        self.varlen_attention_part = shared.varlen_attention_part
        self.merge_attention = shared.merge_attention
        self.absorbed_attention = shared.absorbed_attention
        self.why_no_pages = shared.why_no_pages
        self.plan_paged = shared.plan_paged
        self.paged_attention = shared.paged_attention


class _ByHand:
    """What writes e4m3 numbers, on a GPU that does not know them."""

    def __init__(self, gemm: TritonGemm, overflow: OverflowExperts) -> None:
        self._gemm = gemm
        self._overflow = overflow

    quantize_rows = staticmethod(byte_quant.quantize_rows)

    def grouped_fp8_mlp(
        self,
        rows: Fp8Rows,
        expert_M: Tensor,
        w13: tuple[Tensor, Tensor],
        w2: tuple[Tensor, Tensor],
        overflow: Overflow | None = None,
    ) -> Tensor:
        parts = self._gemm, byte_quant.silu_and_mul_fp8, self._overflow
        return grouped_fp8_mlp(*parts, rows, expert_M, w13=w13, w2=w2, overflow=overflow)

    def masked_fp8_mlp(
        self, rows: MaskedRows, w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]
    ) -> Tensor:
        gate_up = self._gemm.masked_linear(rows, *w13)
        return self._gemm.masked_linear(byte_quant.masked_silu_and_mul_fp8(gate_up, rows), *w2)
