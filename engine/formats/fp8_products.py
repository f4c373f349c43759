"""Products in FP8 put together of a library's GEMMs and of what quantises between them.

One class for all GPUs: what differs is handed in. Beside it the reference, in plain PyTorch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.formats.parts import BlockGemm, MaskedMlp, OverflowMlp
from engine.kernels import expert_reference, reference
from engine.kernels.alignment import Overflow
from engine.kernels.masked_rows import MaskedRows


class QuantizeRows(Protocol):
    """See `reference.quantize_rows`."""

    def __call__(self, x_TK: Tensor, out: Fp8Rows | None = None) -> Fp8Rows:
        """Quantise."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizers:
    """What makes FP8 numbers on a GPU.

    Attributes:
        rows: quantises rows.
        activate: of gate over up [M, 2F] and each row's expert, silu(gate) * up.
        activate_masked: the same of [L, M, 2F] in the masked layout of the rows given.
    """

    rows: QuantizeRows
    activate: Callable[[Tensor, Tensor], Fp8Rows]
    activate_masked: Callable[[Tensor, MaskedRows], MaskedRows]


class GemmProducts:
    """See `Fp8Products`."""

    def __init__(
        self,
        *,
        gemm: BlockGemm,
        quantizers: Quantizers,
        overflow: OverflowMlp,
        experts: MaskedMlp | None = None,
    ) -> None:
        """Take the parts.

        Args:
            gemm: for all products.
            quantizers: for what comes between.
            overflow: for experts' rows behind the capacity.
            experts: over few masked rows; what it does not take `gemm` multiplies.
        """
        self.gemm = gemm
        self.linear = gemm.linear
        self.quantize_rows = quantizers.rows
        self._quantizers, self._overflow, self._experts = quantizers, overflow, experts

    def grouped_mlp(
        self,
        rows: Fp8Rows,
        expert_M: Tensor,
        w13: tuple[Tensor, Tensor],
        w2: tuple[Tensor, Tensor],
        overflow: Overflow | None = None,
    ) -> Tensor:
        """Run the experts over the rows before the capacity, and over those behind it.

        Arguments and result are those of `expert_reference.grouped_fp8_mlp`.
        """
        capacity, num_rows = rows.num_rows, expert_M.shape[0]
        assert capacity == num_rows or overflow is not None, (capacity, num_rows)
        out_MD = torch.empty(
            (num_rows, w2[0].shape[1]), dtype=torch.bfloat16, device=rows.data_TK.device
        )
        expert_C = expert_M[:capacity]
        gate_up = self.gemm.grouped_linear(rows, expert_C, *w13)
        hidden = self._quantizers.activate(gate_up, expert_C)
        self.gemm.grouped_linear(hidden, expert_C, *w2, out=out_MD[:capacity])
        if overflow is not None:
            self._overflow.run(overflow, expert_M[capacity:], w13, w2, out_MD[capacity:])
        return out_MD

    def masked_mlp(
        self, rows: MaskedRows, w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]
    ) -> Tensor:
        """See `expert_reference.masked_fp8_mlp`."""
        if self._experts is not None and self._experts.takes(rows, w13, w2):
            return self._experts.masked_fp8_mlp(rows, w13, w2)
        gate_up = self.gemm.masked_linear(rows, *w13)
        return self.gemm.masked_linear(self._quantizers.activate_masked(gate_up, rows), *w2)


class ReferenceProducts:
    """See `Fp8Products`; so that tests can run the path of GPUs anywhere."""

    quantize_rows = staticmethod(reference.quantize_rows)
    linear = staticmethod(reference.fp8_linear)
    grouped_mlp = staticmethod(expert_reference.grouped_fp8_mlp)
    masked_mlp = staticmethod(expert_reference.masked_fp8_mlp)
