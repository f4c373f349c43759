"""All experts on this rank: dispatching is a sort.

With tp > 1 and ep = 1 each rank holds a slice of every expert's width, so the sum over a token's
experts is a part of a sum over the ranks; `combine` then finishes it.
"""

from torch import Tensor

from engine.kernels.fp8_rows import Activation
from engine.parallel.expert_rows import ExpertRows, plain
from engine.parallel.groups import RankGroup
from engine.parallel.pending import Pending, Ready, wait_for
from engine.parallel.token_dispatcher import RoutedRows, sort_by_expert, sum_per_token


class LocalDispatcher:
    """See the module; `tp_group` is the axis that splits the experts' width."""

    takes_fp8 = False
    waits_for_counts = True

    def __init__(self, num_experts: int, tp_group: RankGroup) -> None:
        self._num_experts = num_experts
        self._tp_group = tp_group

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[ExpertRows, RoutedRows]]:
        """Sort the tokens by expert; see `TokenDispatcher`."""
        hidden_TD = plain(hidden)
        routed = sort_by_expert(topk_ids_TK, topk_weights_TK, 0, self._num_experts)
        rows = ExpertRows(
            rows_MD=hidden_TD.index_select(0, routed.token_M),
            num_rows_per_expert=routed.num_rows_per_expert,
        )
        return Ready((rows, routed))

    def start_combine(
        self, expert_out_MD: Tensor, handle: RoutedRows, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """Sum per token, then over the slices; see `TokenDispatcher`."""
        return self._tp_group.start_all_reduce(sum_per_token(expert_out_MD, handle, wait_for(own)))
