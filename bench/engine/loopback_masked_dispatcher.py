"""One rank alone that does the work of one of many: for measurements, not for serving.

It plays a rank of an expert-parallel instance at balanced routing. Each of R ranks brings T tokens
and holds 1 / R of the experts, so this rank's experts get T * K rows from all ranks together: as
many as its own T tokens choose. So all its own pairs go to its own experts, physical expert e to
local expert e modulo L, in the masked layout with room for the tokens of all R ranks. The key idea:
GEMMs, placement and sums are those of the real rank; only the wire is missing (and the results
mean nothing).
"""

import torch
from torch import Tensor

from engine.formats.expert_rows import quantized
from engine.formats.fp8_rows import Activation
from engine.kernels.base import Kernels
from engine.kernels.masked_rows import (
    MaskedRoom,
    MaskedRows,
    guess_rows,
    max_masked_rows,
)
from engine.ops.masked import MOE_ALIGN_MASKED, PERMUTE_MASKED_ROWS
from engine.ops.permute import UNPERMUTE_ROWS
from engine.parallel.pending import Pending, Ready, wait_for
from engine.parallel.short_rows import MaskedPairs


class LoopbackMaskedDispatcher:
    """See the module."""

    takes_quantized = True
    waits_for_counts = False

    def __init__(self, kernels: Kernels, num_local_experts: int, num_ranks: int) -> None:
        """Play one rank.

        Args:
            kernels: that place and sum.
            num_local_experts: L, experts that this rank holds, at least 2.
            num_ranks: R, ranks of the instance that is played.
        """
        assert num_local_experts > 1, num_local_experts
        self._kernels, ops = kernels, kernels.ops
        self._moe_align_masked = ops[MOE_ALIGN_MASKED]
        self._permute_masked_rows = ops[PERMUTE_MASKED_ROWS]
        self._unpermute_rows = ops[UNPERMUTE_ROWS]
        self._num_local_experts = num_local_experts
        self._num_ranks = num_ranks

    def masked_room(self, num_tokens: int, top_k: int) -> MaskedRoom:
        """See `MaskingDispatcher`."""
        return MaskedRoom(
            max_masked_rows(num_tokens * max(self._num_ranks, top_k)),
            guess_rows(num_tokens, top_k, self._num_local_experts),
        )

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[MaskedRows, MaskedPairs]]:
        """See `TokenDispatcher`."""
        rows = quantized(hidden)
        num_tokens, top_k = topk_ids_TK.shape
        num_local, room = self._num_local_experts, self.masked_room(num_tokens, top_k)
        places = self._moe_align_masked(
            torch.fmod(topk_ids_TK, num_local),  # whose remainder of -1 is -1
            0,
            num_local,
            room.max_rows,
            expected_rows=room.expected_rows,
        )
        masked = self._permute_masked_rows(rows, places)
        handle = MaskedPairs(places=places, topk_weights_TK=topk_weights_TK)
        return Ready((masked, handle))

    def start_combine(
        self, expert_out_LMD: Tensor, handle: MaskedPairs, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """See `TokenDispatcher`."""
        summed_TD = self._unpermute_rows(
            expert_out_LMD.flatten(0, 1), handle.places, handle.topk_weights_TK, wait_for(own)
        )
        return Ready(summed_TD)
