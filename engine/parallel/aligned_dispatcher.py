"""Tokens in FP8 to experts of this rank: nobody else's tokens are needed.

For ranks that run the same tokens, or a rank that runs alone. A pair of token and expert gets its
row on the device (see `Alignment`); the sum over ranks is the all-reduce that tensor parallelism
needs anyway.
"""

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.alignment import Alignment
from engine.kernels.base import Kernels
from engine.kernels.fp8_rows import Activation
from engine.parallel.groups import RankGroup
from engine.parallel.pending import Pending, Ready, Then, wait_for
from engine.parallel.row_placer import RowPlacer
from engine.parallel.token_dispatcher import AlignedRows, quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedHandle:
    """The way back: places of the pairs, and their weights [T, K] float32."""

    alignment: Alignment
    topk_weights_TK: Tensor


class AlignedDispatcher:
    """See the module; this rank holds experts [first, first + num_local_experts)."""

    takes_fp8 = True
    takes_turns = False

    def __init__(
        self, kernels: Kernels, num_local_experts: int, first: int, group: RankGroup
    ) -> None:
        self._kernels = kernels
        self._placer = RowPlacer(kernels, first, num_local_experts)
        self._group = group

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[AlignedRows, AlignedHandle]]:
        """Copy each token to the rows of its local experts; see `TokenDispatcher`."""
        rows = quantized(hidden)

        def spread(alignment: Alignment) -> tuple[AlignedRows, AlignedHandle]:
            aligned = AlignedRows.spread(self._kernels, rows, alignment)
            return aligned, AlignedHandle(alignment=alignment, topk_weights_TK=topk_weights_TK)

        return Then(self._placer.start(Ready(topk_ids_TK), topk_ids_TK.device), spread)

    def start_combine(
        self, expert_out_MD: Tensor, handle: AlignedHandle, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """Sum per token, then over the ranks; see `TokenDispatcher`."""
        summed_TD = self._kernels.gather_rows(
            expert_out_MD, handle.alignment, handle.topk_weights_TK, wait_for(own)
        )
        return self._group.start_all_reduce(summed_TD)
