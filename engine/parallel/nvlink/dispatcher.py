"""Decode inside one NVLink host: a token travels once to each rank that holds its experts.

What arrives stands in the masked layout; what goes home is one sum per token and rank. No number of
rows reaches the host, so a step can be captured in a CUDA graph, and ranks may replay graphs of
different batch sizes. Rows travel in FP8 as the norm has made them, so that the shared expert and
the routed ones are fed by one quantisation.

Every rank calls every start and wait, also with no token at all. A start must follow the wait of
the transfer before it (see the package).
"""

from dataclasses import dataclass

from torch import Tensor

from engine.formats.expert_rows import quantized
from engine.formats.fp8_rows import Activation
from engine.invariants import require
from engine.kernels.masked_rows import MaskedRoom, MaskedRows
from engine.parallel.nvlink.buffer import NvlinkBuffer, ReceivedRows
from engine.parallel.pending import Pending, Then


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkHandle:
    """The way back: experts of this rank's tokens [T, K], and what the dispatch brought."""

    topk_ids_TK: Tensor
    received: ReceivedRows


class NvlinkDispatcher:
    """See the module; all layers share one buffer."""

    takes_quantized = True
    waits_for_counts = False

    def __init__(self, buffer: NvlinkBuffer) -> None:
        self.buffer = buffer

    def masked_room(self, num_tokens: int, top_k: int) -> MaskedRoom:
        """See `MaskingDispatcher`."""
        shape = self.buffer.shape
        require(top_k == shape.top_k, "experts of a token", top_k, f"{shape.top_k} are wanted")
        return MaskedRoom(shape.rows_per_expert, shape.expected_rows(num_tokens))

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[MaskedRows, NvlinkHandle]]:
        """See `TokenDispatcher`; at most `max_tokens_per_rank` tokens."""
        rows = quantized(hidden)
        arriving = self.buffer.start_dispatch(rows, topk_ids_TK, topk_weights_TK)

        def receive(received: ReceivedRows) -> tuple[MaskedRows, NvlinkHandle]:
            return received.rows, NvlinkHandle(topk_ids_TK=topk_ids_TK, received=received)

        return Then(arriving, receive)

    def start_combine(
        self, expert_out_LMD: Tensor, handle: NvlinkHandle, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """See `TokenDispatcher`; `own` is complete for this rank's tokens."""
        return self.buffer.start_combine(expert_out_LMD, handle.received, handle.topk_ids_TK, own)
