"""Every rank has its own rows of a step, and some of the experts or a slice of all of them.

For a residual stream that is scattered over the tp ranks. Rows go to every rank, and each picks
those of its experts: with 8 experts a token and 8 ranks, most ranks need most rows, and a gather
needs no counts. Routing is gathered first, because it is small and the places of the rows can be
chosen while the rows fly: on the device, the host never waits for them. The way back is a sum per
token and a reduce-scatter, that is one message, and each rank gets the rows it came with.

Legend: t rows of this rank, P rows of all ranks (padding included), D hidden size, K experts per
token, B bytes of a packed row.
"""

import torch
from torch import Tensor

from engine.kernels.base import Kernels
from engine.kernels.fp8_rows import Activation, Fp8Rows
from engine.parallel.aligned_dispatcher import AlignedHandle, ExpertShare
from engine.parallel.deferred import Deferred
from engine.parallel.expert_rows import AlignedRows, ExpertRows, plain, quantized
from engine.parallel.groups import RankGroup
from engine.parallel.packed_rows import packed_bytes
from engine.parallel.pending import Pending, Then
from engine.parallel.token_dispatcher import RoutedRows, sort_by_expert, sum_per_token


class GatheredDispatcher:
    """Rows in the compute dtype; this rank holds experts [first, first + num_local_experts)."""

    takes_fp8 = False
    waits_for_counts = True

    def __init__(self, num_local_experts: int, first: int, group: RankGroup) -> None:
        self._num_local_experts, self._first = num_local_experts, first
        self._group = group

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[ExpertRows, RoutedRows]]:
        """Gather routing and rows, and pick those of the local experts; see `TokenDispatcher`."""
        routing = self._group.start_all_gather(pack_routing(topk_ids_TK, topk_weights_TK))
        rows = self._group.start_all_gather(plain(hidden))

        def pick(rows_PD: Tensor) -> tuple[ExpertRows, RoutedRows]:
            ids_PK, weights_PK = unpack_routing(routing.wait())
            routed = sort_by_expert(ids_PK.long(), weights_PK, self._first, self._num_local_experts)
            picked = ExpertRows(
                rows_MD=rows_PD.index_select(0, routed.token_M),
                num_rows_per_expert=routed.num_rows_per_expert,
            )
            return picked, routed

        return Then(rows, pick)

    def start_combine(
        self, expert_out_MD: Tensor, handle: RoutedRows, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """Sum per token, then over the ranks; see `TokenDispatcher`."""
        summed_PD = sum_per_token(expert_out_MD, handle, None)
        return _add_own(self._group.start_reduce_scatter(summed_PD), own)


class GatheredFp8Dispatcher:
    """Rows in FP8."""

    takes_fp8 = True
    waits_for_counts = False

    def __init__(self, kernels: Kernels, share: ExpertShare, group: RankGroup) -> None:
        self._kernels, self._share, self._group = kernels, share, group

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[AlignedRows, AlignedHandle]]:
        """Gather routing, then rows; place them meanwhile; see `TokenDispatcher`."""
        send = quantized(hidden)
        routing = self._group.start_all_gather(pack_routing(topk_ids_TK, topk_weights_TK))
        arriving = self._group.start_all_gather(packed_bytes(send))

        def finish() -> tuple[AlignedRows, AlignedHandle]:
            ids_PK, weights_PK = unpack_routing(routing.wait())
            alignment = self._share.align(self._kernels, ids_PK)
            gathered = Fp8Rows.packed(arriving.wait(), send.data_TK.shape[1])
            rows = AlignedRows.spread(self._kernels, gathered, alignment)
            return rows, AlignedHandle(alignment=alignment, topk_weights_TK=weights_PK)

        return Deferred(finish)

    def start_combine(
        self, expert_out_MD: Tensor, handle: AlignedHandle, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """Sum per token, then over the ranks; see `TokenDispatcher`."""
        summed_PD = self._kernels.gather_rows(
            expert_out_MD, handle.alignment, handle.topk_weights_TK, None
        )
        return _add_own(self._group.start_reduce_scatter(summed_PD), own)


def pack_routing(topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
    """Return [T, 2K] int32: ids, then the bits of the weights; one message for both."""
    return torch.cat((topk_ids_TK.int(), topk_weights_TK.view(torch.int32)), dim=1)


def unpack_routing(routing_T2K: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids [T, K] int32 and weights [T, K] float32: views, so that nothing is launched."""
    ids_TK, weights_TK = routing_T2K.chunk(2, dim=1)
    return ids_TK, weights_TK.view(torch.float32)


def _add_own(reducing: Pending[Tensor], own: Pending[Tensor] | None) -> Pending[Tensor]:
    if own is None:
        return reducing
    return Then(reducing, lambda sum_TD: sum_TD.add_(own.wait()))
