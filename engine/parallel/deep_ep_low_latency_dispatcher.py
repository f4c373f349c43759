"""Decode: few tokens are dispatched to the ranks of their experts by DeepEP, in fixed shapes.

What arrives already stands in the masked layout, quantised on the way, and the way home sums a
token's rows weighted: nothing is placed or weighted here. The key idea: no number of rows ever
reaches the host, so a whole step can be captured in a CUDA graph; and between a start and its wait
nothing runs for the transfer, so the shared expert has the GPU to itself.

Every rank calls every start and wait, also with no token at all. A start must follow the wait of
the transfer before it (see `LowLatencyBuffer`).
"""

from dataclasses import dataclass

from torch import Tensor

from engine.formats.expert_rows import plain
from engine.formats.fp8_rows import Activation
from engine.invariants import require
from engine.kernels.masked_rows import MaskedRoom, MaskedRows
from engine.parallel.deep_ep_buffers import LibraryHandle, LowLatencyBuffer, Masked
from engine.parallel.pending import Pending, Then


@dataclass(frozen=True, slots=True, kw_only=True)
class LowLatencyHandle:
    """The way back: routing of this rank's tokens [T, K], and the library's handle."""

    topk_ids_TK: Tensor
    topk_weights_TK: Tensor
    handle: LibraryHandle


class DeepEPLowLatencyDispatcher:
    """See the module; all layers share one buffer."""

    takes_quantized = False
    waits_for_counts = False

    def __init__(self, buffer: LowLatencyBuffer) -> None:
        self._buffer = buffer

    def masked_room(self, num_tokens: int, top_k: int) -> MaskedRoom:
        """See `MaskingDispatcher`."""
        shape = self._buffer.shape
        return MaskedRoom(shape.rows_per_expert, shape.expected_rows(num_tokens, top_k))

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[MaskedRows, LowLatencyHandle]]:
        """See `TokenDispatcher`; at most `max_tokens_per_rank` tokens in bfloat16."""
        hidden_TD = plain(hidden)
        num_tokens, top_k = topk_ids_TK.shape
        shape = self._buffer.shape
        most = shape.max_tokens_per_rank
        require(num_tokens <= most, "tokens of a rank", num_tokens, f"there is room for {most}")
        arriving = self._buffer.start_dispatch(hidden_TD, topk_ids_TK)

        def receive(masked: Masked) -> tuple[MaskedRows, LowLatencyHandle]:
            rows = MaskedRows(
                data_LMD=masked.data_LMD,
                scale_LMG=masked.scale_LMG,
                num_rows_L=masked.num_rows_L,
                expected_rows=self.masked_room(num_tokens, top_k).expected_rows,
            )
            handle = LowLatencyHandle(
                topk_ids_TK=topk_ids_TK, topk_weights_TK=topk_weights_TK, handle=masked.handle
            )
            return rows, handle

        return Then(arriving, receive)

    def start_combine(
        self, expert_out_LMD: Tensor, handle: LowLatencyHandle, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """See `TokenDispatcher`; `own` is complete for this rank's tokens."""
        arriving = self._buffer.start_combine(
            expert_out_LMD, handle.topk_ids_TK, handle.topk_weights_TK, handle.handle
        )
        if own is None:
            return arriving
        return Then(arriving, lambda out_TD: out_TD.add_(own.wait()))
