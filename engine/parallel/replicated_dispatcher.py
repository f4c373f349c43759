"""Every rank runs the same tokens and holds some of the experts (tp attention with ep experts).

Nothing has to be sent: a rank picks the rows of its own experts, and the all-reduce that tensor
parallelism needs anyway sums the experts of all ranks.
"""

from torch import Tensor

from engine.kernels.fp8_rows import Activation
from engine.parallel.expert_rows import ExpertRows, plain
from engine.parallel.groups import RankGroup
from engine.parallel.pending import Pending, Ready, wait_for
from engine.parallel.token_dispatcher import RoutedRows, sort_by_expert, sum_per_token


class ReplicatedDispatcher:
    """See the module; `num_local_experts` is the same on all ranks of `ep_group`."""

    takes_fp8 = False
    waits_for_counts = True

    def __init__(self, num_local_experts: int, ep_group: RankGroup) -> None:
        self._num_local_experts = num_local_experts
        self._first = num_local_experts * ep_group.rank
        self._ep_group = ep_group

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[ExpertRows, RoutedRows]]:
        """Pick the rows of this rank's experts; see `TokenDispatcher`."""
        hidden_TD = plain(hidden)
        routed = sort_by_expert(topk_ids_TK, topk_weights_TK, self._first, self._num_local_experts)
        rows = ExpertRows(
            rows_MD=hidden_TD.index_select(0, routed.token_M),
            num_rows_per_expert=routed.num_rows_per_expert,
        )
        return Ready((rows, routed))

    def start_combine(
        self, expert_out_MD: Tensor, handle: RoutedRows, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """Sum per token, then over the ranks; see `TokenDispatcher`."""
        return self._ep_group.start_all_reduce(sum_per_token(expert_out_MD, handle, wait_for(own)))
