"""Tokens in FP8 to experts of this rank, without waiting for the device to count.

For ranks that run the same tokens, or a rank that runs alone. A pair of token and expert gets its
row on the device (see `Alignment`); the number of rows is an upper bound, and rows that no token
uses are skipped by the products. The sum over ranks is the all-reduce that tensor parallelism
needs anyway.
"""

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.alignment import Alignment
from engine.kernels.base import Kernels
from engine.kernels.fp8_rows import Activation, Fp8Rows
from engine.parallel.groups import RankGroup
from engine.parallel.token_dispatcher import AlignedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedHandle:
    """The way back: places of the pairs, and their weights [T, K] float32."""

    alignment: Alignment
    topk_weights_TK: Tensor


class AlignedDispatcher:
    """See the module; this rank holds experts [first, first + num_local_experts)."""

    takes_fp8 = True

    def __init__(
        self, kernels: Kernels, num_local_experts: int, first: int, group: RankGroup
    ) -> None:
        self._kernels = kernels
        self._num_local_experts = num_local_experts
        self._first = first
        self._group = group

    def dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> tuple[AlignedRows, AlignedHandle]:
        """Copy each token to the rows of its local experts; see `TokenDispatcher`."""
        rows = hidden if isinstance(hidden, Fp8Rows) else self._kernels.quantize_rows(hidden)
        alignment = self._kernels.align_to_experts(
            topk_ids_TK, self._first, self._num_local_experts
        )
        aligned = AlignedRows(
            rows=self._kernels.spread_rows(rows, alignment), expert_M=alignment.expert_M
        )
        return aligned, AlignedHandle(alignment=alignment, topk_weights_TK=topk_weights_TK)

    def combine(
        self, expert_out_MD: Tensor, handle: AlignedHandle, own_TD: Tensor | None
    ) -> Tensor:
        """Sum per token, then over the ranks; see `TokenDispatcher`."""
        summed = self._kernels.gather_rows(
            expert_out_MD, handle.alignment, handle.topk_weights_TK, own_TD
        )
        return self._group.all_reduce(summed)
