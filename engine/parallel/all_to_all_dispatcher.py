"""Every rank has its own tokens and some of the experts (data-parallel attention with ep experts).

Life of a dispatch: sort rows by expert, which is also by owning rank; tell every rank how many rows
each of its experts gets; exchange the rows; sort what arrived by local expert. Combine goes back
the same way. The key idea: counts vary freely, also down to no token at all, but every rank makes
every call, because each is a collective. Rows to experts in FP8 travel packed; what comes back is
in the compute dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.alignment import ROW_BLOCK, Alignment
from engine.kernels.base import Kernels
from engine.kernels.fp8_rows import Activation, Fp8Rows
from engine.parallel.expert_rows import AlignedRows, ExpertRows, Rows, plain, quantized
from engine.parallel.groups import RankGroup
from engine.parallel.packed_rows import packed_bytes
from engine.parallel.pending import Pending, Ready, Then, wait_for
from engine.parallel.token_dispatcher import RoutedRows, sort_by_expert, sum_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Who sends how many rows to whom.

    Attributes:
        routed: this rank's rows as they are sent, sorted by physical expert.
        num_sent: rows sent to each rank.
        num_received: rows received from each rank.
        num_rows_per_expert: rows received by each local expert.
        expert_M: [M] int64, local expert of each row, in order of arrival.
    """

    routed: RoutedRows
    num_sent: list[int]
    num_received: list[int]
    num_rows_per_expert: list[int]
    expert_M: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllHandle:
    """The way back.

    Attributes:
        exchange: to be undone.
        places_M: [M] int64, for each row, in order of arrival, its place at the experts.
    """

    exchange: Exchange
    places_M: Tensor


class AllToAllDispatcher:
    """See the module; `num_local_experts` is the same on all ranks of `ep_group`."""

    def __init__(
        self, num_local_experts: int, ep_group: RankGroup, fp8_kernels: Kernels | None = None
    ) -> None:
        """Take the kernels if, and only if, the experts are in FP8."""
        self._num_local_experts = num_local_experts
        self._ep_group = ep_group
        self._kernels = fp8_kernels
        self.takes_fp8 = fp8_kernels is not None
        self.waits_for_counts = True

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[Rows, AllToAllHandle]]:
        """Send rows to the ranks of their experts; see `TokenDispatcher`.

        All of it happens in `wait`, which stops the host for the counts.
        """
        return Then(
            Ready(hidden), lambda hidden: self._dispatch(hidden, topk_ids_TK, topk_weights_TK)
        )

    def start_combine(
        self, expert_out_MD: Tensor, handle: AllToAllHandle, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """Send the rows home and sum them per token; see `TokenDispatcher`."""
        exchange = handle.exchange
        arrived_MD = expert_out_MD.index_select(0, handle.places_M)
        home = self._ep_group.start_all_to_all(arrived_MD, exchange.num_received, exchange.num_sent)
        return Then(home, lambda rows_MD: sum_per_token(rows_MD, exchange.routed, wait_for(own)))

    def _dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> tuple[Rows, AllToAllHandle]:
        exchange = self._agree(topk_ids_TK, topk_weights_TK)
        if self._kernels is None:
            return _sort(self._send(plain(hidden), exchange), exchange)
        rows = quantized(hidden)
        arrived_MB = self._send(packed_bytes(rows), exchange)
        arrived = Fp8Rows.packed(arrived_MB, rows.data_TK.shape[1])
        return _align(self._kernels, arrived, exchange)

    def _agree(self, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Exchange:
        num_ranks, num_local = self._ep_group.size, self._num_local_experts
        device = topk_ids_TK.device
        routed = sort_by_expert(topk_ids_TK, topk_weights_TK, 0, num_ranks * num_local)
        sent = torch.tensor(routed.num_rows_per_expert, device=device).view(num_ranks, num_local)
        ones = [1] * num_ranks
        received = self._ep_group.all_to_all(sent, ones, ones)  # [rank, local expert]
        # Rows arrive sorted by (rank, expert).
        expert_of_run = torch.arange(num_local, device=device).repeat(num_ranks)
        return Exchange(
            routed=routed,
            num_sent=sent.sum(1).tolist(),
            num_received=received.sum(1).tolist(),
            num_rows_per_expert=received.sum(0).tolist(),
            expert_M=expert_of_run.repeat_interleave(received.reshape(-1)),
        )

    def _send(self, rows: Tensor, exchange: Exchange) -> Tensor:
        return self._ep_group.all_to_all(
            rows.index_select(0, exchange.routed.token_M), exchange.num_sent, exchange.num_received
        )


def _sort(rows_MD: Tensor, exchange: Exchange) -> tuple[ExpertRows, AllToAllHandle]:
    """Put rows in the order of the experts."""
    order_M = torch.argsort(exchange.expert_M, stable=True)
    places_M = torch.empty_like(order_M)
    places_M[order_M] = torch.arange(order_M.shape[0], device=order_M.device)
    rows = ExpertRows(
        rows_MD=rows_MD.index_select(0, order_M), num_rows_per_expert=exchange.num_rows_per_expert
    )
    return rows, AllToAllHandle(exchange=exchange, places_M=places_M)


def _align(
    kernels: Kernels, rows: Fp8Rows, exchange: Exchange
) -> tuple[AlignedRows, AllToAllHandle]:
    """Put rows into the aligned layout; each is one (token, expert) pair."""
    sizes = exchange.num_rows_per_expert
    num_rows = sum(-(-size // ROW_BLOCK) * ROW_BLOCK for size in sizes)
    counts = kernels.count_rows(exchange.expert_M.unsqueeze(1), 0, len(sizes))
    alignment: Alignment = counts.lay_out(counts.rows_to_lay_out(num_rows))
    aligned = AlignedRows.spread(kernels, rows, alignment)
    places_M = alignment.rows_TK.flatten().long()
    return aligned, AllToAllHandle(exchange=exchange, places_M=places_M)
