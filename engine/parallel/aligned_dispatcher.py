"""Tokens in FP8 to experts of this rank: nobody else's tokens are needed.

For ranks that run the same tokens, or a rank that runs alone. A pair of token and expert gets its
row on the device (see `engine.kernels.alignment`), and the host never waits for how many there are;
the sum over ranks is the all-reduce that tensor parallelism needs anyway.
"""

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.alignment import Alignment, row_capacity
from engine.kernels.base import Kernels
from engine.kernels.fp8_rows import Activation
from engine.parallel.deferred import Deferred
from engine.parallel.expert_rows import AlignedRows, quantized
from engine.parallel.groups import RankGroup
from engine.parallel.pending import Pending, wait_for


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShare:
    """The routed experts of one rank: [first, first + num_local).

    Attributes:
        first: lowest physical expert.
        num_local: how many.
        num_ranks: that share all of them, evenly; 1 where each rank has all, or a slice of each.
    """

    first: int
    num_local: int
    num_ranks: int

    def align(self, kernels: Kernels, topk_ids_TK: Tensor) -> Alignment:
        """Place the pairs of [T, K] int64 or int32 physical experts, without asking the device."""
        capacity = row_capacity(topk_ids_TK.numel(), self.num_local, self.num_ranks)
        return kernels.align_to_experts(topk_ids_TK, self.first, self.num_local, capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedHandle:
    """The way back: places of the pairs, and their weights [T, K] float32."""

    alignment: Alignment
    topk_weights_TK: Tensor


class AlignedDispatcher:
    """See the module."""

    takes_fp8 = True
    waits_for_counts = False

    def __init__(self, kernels: Kernels, share: ExpertShare, group: RankGroup) -> None:
        """Take the ranks that sum; see `create_dispatcher`."""
        self._kernels, self._share, self._group = kernels, share, group

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[AlignedRows, AlignedHandle]]:
        """Copy each token to the rows of its local experts; see `TokenDispatcher`."""
        source = quantized(hidden)

        def finish() -> tuple[AlignedRows, AlignedHandle]:
            alignment = self._share.align(self._kernels, topk_ids_TK)
            rows = AlignedRows.spread(self._kernels, source, alignment)
            return rows, AlignedHandle(alignment=alignment, topk_weights_TK=topk_weights_TK)

        return Deferred(finish)

    def start_combine(
        self, expert_out_MD: Tensor, handle: AlignedHandle, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """Sum per token, then over the ranks; see `TokenDispatcher`."""
        summed_TD = self._kernels.gather_rows(
            expert_out_MD, handle.alignment, handle.topk_weights_TK, wait_for(own)
        )
        return self._group.start_all_reduce(summed_TD)
