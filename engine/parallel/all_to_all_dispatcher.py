"""Every rank has its own tokens and some of the experts (data-parallel attention with ep experts).

Life of a dispatch: sort rows by expert, which is also by owning rank; tell every rank how many rows
each of its experts gets; exchange the rows; sort what arrived by local expert. Combine goes back
the same way. The key idea: counts vary freely, also down to no token at all, but every rank makes
every call, because each is a collective. What comes back is in the compute dtype.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.formats.expert_rows import Rows
from engine.formats.fp8_rows import Activation
from engine.parallel.groups import RankGroup
from engine.parallel.pending import Deferred, Pending, Then, wait_for
from engine.parallel.row_formats import (
    RowFormat,
    SortedPairs,
    sort_by_expert,
    sum_per_token,
)
from engine.parallel.wait_recorder import WaitRecorder
from runtime.stragglers.rank_waits import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Who sends how many rows to whom.

    Attributes:
        sent: this rank's pairs as they are sent, sorted by physical expert.
        num_sent: rows sent to each rank.
        num_received: rows received from each rank.
        num_rows_per_expert: rows received by each local expert.
        expert_M: [M] int64, local expert of each row, in order of arrival.
    """

    sent: SortedPairs
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
    """See the module; as many experts on each rank of `ep_group`."""

    waits_for_counts = True

    def __init__(
        self, rows: RowFormat[Any], ep_group: RankGroup, waits: WaitRecorder | None = None
    ) -> None:
        """Take the form of rows, which knows this rank's experts, and the ranks.

        `waits` records who waits for whom; only of a CPU, where collectives stop the host.
        """
        self._format, self._ep_group, self.waits = rows, ep_group, waits
        self.takes_quantized = rows.takes_quantized

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[Rows, AllToAllHandle]]:
        """Send rows to the ranks of their experts; see `TokenDispatcher`.

        All of it happens in `wait`, which stops the host for the counts.
        """
        return Deferred(lambda: self._dispatch(hidden, topk_ids_TK, topk_weights_TK))

    def start_combine(
        self, expert_out_MD: Tensor, handle: AllToAllHandle, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """Send the rows home and sum them per token; see `TokenDispatcher`."""
        exchange = handle.exchange
        arrived_MD = expert_out_MD.index_select(0, handle.places_M)
        home = self._ep_group.start_all_to_all(arrived_MD, exchange.num_received, exchange.num_sent)
        if self.waits is not None:
            home = self._recorded(home, self.waits)
        return Then(home, lambda rows_MD: sum_per_token(rows_MD, exchange.sent, wait_for(own)))

    def _recorded(self, home: Pending[Tensor], waits: WaitRecorder) -> Pending[Tensor]:
        """Return the same rows; who waits for them records for whom."""
        waits.announce()

        def wait() -> Tensor:
            with waits.waiting(Phase.COMBINE, is_announced=True):
                return home.wait()

        return Deferred(wait)

    def _dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> tuple[Rows, AllToAllHandle]:
        with self._waiting():
            exchange = self._agree(topk_ids_TK, topk_weights_TK)
        if self.waits is not None:
            self.waits.received(sum(exchange.num_received))
        message = self._format.pack(hidden).index_select(0, exchange.sent.token_M)
        arrived = self._ep_group.all_to_all(message, exchange.num_sent, exchange.num_received)
        rows, places_M = self._format.sort(
            self._format.unpack(arrived, hidden), exchange.expert_M, exchange.num_rows_per_expert
        )
        return rows, AllToAllHandle(exchange=exchange, places_M=places_M)

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self.waits is None else self.waits.waiting(Phase.DISPATCH)

    def _agree(self, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Exchange:
        num_ranks, num_local = self._ep_group.size, self._format.share.num_local
        device = topk_ids_TK.device
        routed = sort_by_expert(topk_ids_TK, topk_weights_TK, 0, num_ranks * num_local)
        sent = torch.tensor(routed.num_rows_per_expert, device=device).view(num_ranks, num_local)
        ones = [1] * num_ranks
        received = self._ep_group.all_to_all(sent, ones, ones)  # [rank, local expert]
        # Rows arrive sorted by (rank, expert).
        expert_of_run = torch.arange(num_local, device=device).repeat(num_ranks)
        return Exchange(
            sent=routed,
            num_sent=sent.sum(1).tolist(),
            num_received=received.sum(1).tolist(),
            num_rows_per_expert=received.sum(0).tolist(),
            expert_M=expert_of_run.repeat_interleave(received.reshape(-1)),
        )
