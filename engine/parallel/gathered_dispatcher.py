"""Every rank has its own rows of a step, and some of the experts or a slice of all of them.

For a residual stream that is scattered over the tp ranks. Rows go to every rank, and each picks
those of its experts: with 8 experts a token and 8 ranks, most ranks need most rows, and a gather
needs no counts. Routing is gathered first, because it is small and the places of the rows can be
chosen while the rows fly. The way back is a sum per token and a reduce-scatter, that is one
message, and each rank gets the rows it came with. Where ranks send by stores both are one kernel,
which sends nothing for a token that has none of the rank's experts.

Legend: T rows of this rank, P rows of all ranks (padding included), D hidden size, K experts per
token.
"""

from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from engine.formats.expert_rows import Rows
from engine.formats.fp8_rows import Activation
from engine.parallel.groups import RankGroup
from engine.parallel.pending import Deferred, Pending
from engine.parallel.row_formats import Plan, RowFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredPlan(Generic[Plan]):
    """What a combine needs: where all ranks' rows are, and what this rank's tokens chose.

    Attributes:
        rows: of all ranks' tokens, of the format's making.
        own_ids_TK: [T, K], as given to the dispatch.
    """

    rows: Plan
    own_ids_TK: Tensor


class GatheredDispatcher(Generic[Plan]):
    """See the module."""

    def __init__(self, rows: RowFormat[Plan], group: RankGroup) -> None:
        """Take the form of rows, which knows this rank's experts, and the ranks."""
        self._format, self._group = rows, group
        self.takes_quantized, self.waits_for_counts = rows.takes_quantized, rows.waits_for_counts

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[Rows, GatheredPlan[Plan]]]:
        """Gather routing, then rows; plan meanwhile; see `TokenDispatcher`."""
        routing = self._group.start_all_gather(pack_routing(topk_ids_TK, topk_weights_TK))
        arriving = self._group.start_all_gather(self._format.pack(hidden))

        def finish() -> tuple[Rows, GatheredPlan[Plan]]:
            plan = self._format.plan(*unpack_routing(routing.wait()))
            gathered = self._format.unpack(arriving.wait(), hidden)
            rows = self._format.permute(gathered, plan)
            return rows, GatheredPlan(rows=plan, own_ids_TK=topk_ids_TK)

        return Deferred(finish)

    def start_combine(
        self, expert_out_MD: Tensor, handle: GatheredPlan[Plan], own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """Sum per token, then over the ranks; see `TokenDispatcher`."""
        pairs = self._format.pair_rows(expert_out_MD, handle.rows, handle.own_ids_TK)
        if pairs is not None and self._group.sums_pairs(pairs):
            return self._group.start_sum_of_pairs(pairs, own)
        summed_PD = self._format.unpermute(expert_out_MD, handle.rows, None)
        return self._group.start_reduce_scatter(summed_PD, own)


def pack_routing(topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
    """Return [T, 2K] int32: ids, then the bits of the weights; one message for both."""
    return torch.cat((topk_ids_TK.int(), topk_weights_TK.view(torch.int32)), dim=1)


def unpack_routing(routing_T2K: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids [T, K] int32 and weights [T, K] float32: views, so that nothing is launched."""
    ids_TK, weights_TK = routing_T2K.chunk(2, dim=1)
    return ids_TK, weights_TK.view(torch.float32)
