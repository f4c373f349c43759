"""Prefill with data-parallel attention: DeepEP dispatches tokens to the ranks of their experts.

A token is sent once to every rank that holds any of its experts, in FP8. What arrives is one row
per token; here it is copied to the rows of its local experts, and the experts' results are summed,
weighted, into one row per token before combine, where the library adds up the ranks' rows
and the rank's own term. The key idea: the library's counts of received rows are exact and reach the
host while another micro-batch computes, so the GEMMs are as large as the work, and no larger.

`wait` of a dispatch blocks the host: launch the other micro-batch's work before it, and no step
ahead of another (`waits_for_counts`). The library can do without counts (`num_worst_tokens`), with
room for the tokens of all R ranks: then rows are laid out for R times the even share, 524,288 of
them for eight ranks of 8,192 tokens, which take 9 GB with DeepSeek-V3.
"""

from dataclasses import dataclass

from torch import Tensor

from engine.formats.expert_rows import AlignedRows, quantized
from engine.formats.fp8_rows import Activation
from engine.kernels.alignment import ROW_BLOCK, Alignment
from engine.kernels.base import Kernels
from engine.ops.permute import COUNT_ROWS, UNPERMUTE_ROWS
from engine.parallel.deep_ep_buffers import Arrived, LibraryHandle, NormalBuffer
from engine.parallel.pending import Pending, Then, wait_for


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalHandle:
    """The way back.

    Attributes:
        alignment: places of the received tokens' rows.
        topk_weights_NK: [N, K] float32 of the received tokens.
        handle: of the library.
    """

    alignment: Alignment
    topk_weights_NK: Tensor
    handle: LibraryHandle


class DeepEPNormalDispatcher:
    """See the module; all layers share one buffer."""

    takes_quantized = True
    waits_for_counts = True

    def __init__(self, kernels: Kernels, buffer: NormalBuffer) -> None:
        self._kernels, self._ops = kernels, kernels.ops
        self._count_rows, self._unpermute_rows = self._ops[COUNT_ROWS], self._ops[UNPERMUTE_ROWS]
        self._buffer = buffer

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[AlignedRows, NormalHandle]]:
        """See `TokenDispatcher`."""
        rows = quantized(hidden)
        arriving = self._buffer.start_dispatch(
            rows, topk_ids_TK, topk_weights_TK, alignment=ROW_BLOCK
        )
        return Then(arriving, self._align)

    def start_combine(
        self, expert_out_MD: Tensor, handle: NormalHandle, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """See `TokenDispatcher`; `own` is complete for this rank's tokens."""
        out_ND = self._unpermute_rows(expert_out_MD, handle.alignment, handle.topk_weights_NK, None)
        return self._buffer.start_combine(out_ND, handle.handle, wait_for(own))

    def _align(self, arrived: Arrived) -> tuple[AlignedRows, NormalHandle]:
        counts = self._count_rows(arrived.topk_ids_NK, 0, self._buffer.shape.num_local_experts)
        num_rows = counts.rows_to_lay_out(sum(arrived.num_rows_per_expert))
        alignment = counts.lay_out(num_rows)
        aligned = AlignedRows.permute(self._ops, arrived.rows, alignment)
        handle = NormalHandle(
            alignment=alignment, topk_weights_NK=arrived.topk_weights_NK, handle=arrived.handle
        )
        return aligned, handle
