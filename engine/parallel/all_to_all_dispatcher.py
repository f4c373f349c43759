"""Every rank has its own tokens and some of the experts (data-parallel attention with ep experts).

Life of a dispatch: sort rows by expert, which is also by owning rank; tell every rank how many rows
each of its experts gets; exchange the rows; sort what arrived by local expert. Combine goes back
the same way. The key idea: counts vary freely, also down to no token at all, but every rank makes
every call, because each is a collective.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.fp8_rows import Activation
from engine.parallel.groups import RankGroup
from engine.parallel.token_dispatcher import (
    ExpertRows,
    RoutedRows,
    plain,
    sort_by_expert,
    sum_per_token,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllHandle:
    """The way back.

    Attributes:
        routed: this rank's rows as they were sent, sorted by physical expert.
        num_sent: rows sent to each rank.
        num_received: rows received from each rank.
        arrival_order_M: [M] int64, for each expert-sorted row its place in order of arrival.
    """

    routed: RoutedRows
    num_sent: list[int]
    num_received: list[int]
    arrival_order_M: Tensor


class AllToAllDispatcher:
    """See the module; `num_local_experts` is the same on all ranks of `ep_group`."""

    takes_fp8 = False

    def __init__(self, num_local_experts: int, ep_group: RankGroup) -> None:
        self._num_local_experts = num_local_experts
        self._ep_group = ep_group

    def dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> tuple[ExpertRows, AllToAllHandle]:
        """Send rows to the ranks of their experts; see `TokenDispatcher`."""
        hidden_TD = plain(hidden)
        num_ranks, num_local = self._ep_group.size, self._num_local_experts
        routed = sort_by_expert(topk_ids_TK, topk_weights_TK, 0, num_ranks * num_local)
        sent = torch.tensor(routed.num_rows_per_expert, device=hidden_TD.device)
        sent = sent.view(num_ranks, num_local)
        ones = [1] * num_ranks
        received = self._ep_group.all_to_all(sent, ones, ones)  # [rank, local expert]
        num_sent, num_received = sent.sum(1).tolist(), received.sum(1).tolist()
        rows_MD = self._ep_group.all_to_all(
            hidden_TD.index_select(0, routed.token_M), num_sent, num_received
        )
        # Arrived sorted by (rank, expert); the experts want (expert, rank).
        expert_of_run = torch.arange(num_local, device=hidden_TD.device).repeat(num_ranks)
        expert_M = expert_of_run.repeat_interleave(received.reshape(-1))
        arrival_order_M = torch.argsort(expert_M, stable=True)
        handle = AllToAllHandle(
            routed=routed,
            num_sent=num_sent,
            num_received=num_received,
            arrival_order_M=arrival_order_M,
        )
        rows = ExpertRows(
            rows_MD=rows_MD.index_select(0, arrival_order_M),
            num_rows_per_expert=received.sum(0).tolist(),
        )
        return rows, handle

    def combine(
        self, expert_out_MD: Tensor, handle: AllToAllHandle, own_TD: Tensor | None
    ) -> Tensor:
        """Send the rows home and sum them per token; see `TokenDispatcher`."""
        arrived = torch.empty_like(expert_out_MD)
        arrived[handle.arrival_order_M] = expert_out_MD
        home = self._ep_group.all_to_all(arrived, handle.num_received, handle.num_sent)
        return sum_per_token(home, handle.routed, own_TD)
