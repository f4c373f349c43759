"""Experts of this rank for tokens that it has: nobody else's are needed, and nothing is sent.

For a rank alone, ranks that hold slices of every expert's width (tp with ep = 1), and ranks that
run the same tokens and hold some of the experts each (tp = ep). What a rank sums over a token's
experts is then a part of a sum over the ranks: the all-reduce that tensor parallelism needs anyway.
"""

from typing import Generic

from torch import Tensor

from engine.formats.expert_rows import Rows
from engine.formats.fp8_rows import Activation
from engine.parallel.groups import RankGroup
from engine.parallel.pending import Deferred, Pending, wait_for
from engine.parallel.row_formats import Plan, RowFormat


class LocalDispatcher(Generic[Plan]):
    """See the module."""

    def __init__(self, rows: RowFormat[Plan], group: RankGroup) -> None:
        """Take the form of rows, which knows this rank's experts, and the ranks that sum."""
        self._format, self._group = rows, group
        self.takes_quantized, self.waits_for_counts = rows.takes_quantized, rows.waits_for_counts

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[Rows, Plan]]:
        """Copy each token to the rows of its local experts; see `TokenDispatcher`.

        All of it happens in `wait`.
        """

        def finish() -> tuple[Rows, Plan]:
            plan = self._format.plan(topk_ids_TK, topk_weights_TK)
            return self._format.permute(hidden, plan), plan

        return Deferred(finish)

    def start_combine(
        self, expert_out_MD: Tensor, handle: Plan, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """Sum per token, then over the ranks; see `TokenDispatcher`."""
        return self._group.start_all_reduce(
            self._format.unpermute(expert_out_MD, handle, wait_for(own))
        )
