"""In which form rows go to experts: as numbers of which kind, and in which layout; a dispatcher's.

A dispatcher says who sends rows to whom. A format says what is sent, in which order rows stand at
the experts, and how their results become one sum a token. The key idea: the ways to travel and the
forms are independent, so there is one class for each and not one for each pair.

Legend: T tokens, D hidden size, K experts per token, L local experts, M rows at them, B bytes of a
packed row.
"""

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from engine.formats.base import NumberFormat, RowCodec
from engine.formats.expert_rows import AlignedRows, ExpertRows, Rows, plain, quantized
from engine.formats.fp8_rows import Activation
from engine.kernels.alignment import ROW_BLOCK, Alignment, row_capacity
from engine.ops.op import Ops
from engine.ops.permute import COUNT_ROWS, MOE_ALIGN_BLOCK_SIZE, UNPERMUTE_ROWS
from engine.parallel.pair_rows import PairRows

Plan = TypeVar("Plan")


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


class RowFormat(Protocol[Plan]):
    """A number format of rows with its layout at the experts.

    Attributes:
        share: the experts of this rank.
        takes_quantized: whether rows are quantised.
        waits_for_counts: see `TokenDispatcher`.
    """

    @property
    def share(self) -> ExpertShare:
        """See the class."""
        ...

    @property
    def takes_quantized(self) -> bool:
        """See the class."""
        ...

    @property
    def waits_for_counts(self) -> bool:
        """See the class."""
        ...

    def pack(self, hidden: Activation) -> Tensor:
        """Return what travels of rows [T, D]: one message, a row of it for each."""
        ...

    def unpack(self, message: Tensor, like: Activation) -> Activation:
        """Return the rows of a message, [T, D]; `like` has as many columns, and any rows."""
        ...

    def plan(self, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Plan:
        """Choose the rows of this rank's pairs of token and expert.

        Args:
            topk_ids_TK: [T, K] int64 or int32 physical experts, -1 for none.
            topk_weights_TK: [T, K] float32.
        """
        ...

    def permute(self, rows: Activation, plan: Plan) -> Rows:
        """Copy tokens [T, D] to the rows of their local experts."""
        ...

    def unpermute(self, expert_out_MD: Tensor, plan: Plan, own_TD: Tensor | None) -> Tensor:
        """Return [T, D]: the weighted sum of each token's rows, plus `own_TD`, which stays."""
        ...

    def pair_rows(self, expert_out_MD: Tensor, plan: Plan, own_ids_TK: Tensor) -> PairRows | None:
        """Return what `unpermute` sums, for a sum that is made elsewhere; None if not by place.

        Args:
            expert_out_MD: as given to `unpermute`.
            plan: of tokens of all ranks.
            own_ids_TK: see `PairRows`.
        """
        ...

    def sort(
        self, rows: Activation, expert_M: Tensor, num_rows_per_expert: list[int]
    ) -> tuple[Rows, Tensor]:
        """Put rows that are one pair each in the order of the experts.

        Args:
            rows: [M, D], in any order.
            expert_M: [M] int64, local expert of each row.
            num_rows_per_expert: L counts that sum to M.

        Returns:
            The rows, and [M] int64: for each of them, in the order given, its place there.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedPairs:
    """Pairs of token and expert, sorted by expert, with the way back.

    Attributes:
        token_M: [M] int64, the token of each row.
        weight_M: [M] float32, the token's weight for that row's expert.
        num_rows_per_expert: rows of each expert.
        num_tokens: T.
    """

    token_M: Tensor
    weight_M: Tensor
    num_rows_per_expert: list[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Rows in the compute dtype, sorted by expert; the host reads how many each of them has."""

    share: ExpertShare
    takes_quantized = False
    waits_for_counts = True

    def pack(self, hidden: Activation) -> Tensor:
        """See `RowFormat`."""
        return plain(hidden)

    def unpack(self, message: Tensor, like: Activation) -> Activation:
        """See `RowFormat`."""
        return message

    def plan(self, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> SortedPairs:
        """See `RowFormat`."""
        share = self.share
        return sort_by_expert(topk_ids_TK.long(), topk_weights_TK, share.first, share.num_local)

    def permute(self, rows: Activation, plan: SortedPairs) -> ExpertRows:
        """See `RowFormat`."""
        return ExpertRows(
            rows_MD=plain(rows).index_select(0, plan.token_M),
            num_rows_per_expert=plan.num_rows_per_expert,
        )

    def unpermute(self, expert_out_MD: Tensor, plan: SortedPairs, own_TD: Tensor | None) -> Tensor:
        """See `RowFormat`."""
        return sum_per_token(expert_out_MD, plan, own_TD)

    def pair_rows(
        self, expert_out_MD: Tensor, plan: SortedPairs, own_ids_TK: Tensor
    ) -> PairRows | None:
        """See `RowFormat`: rows know their tokens here, and not tokens their rows."""
        return None

    def sort(
        self, rows: Activation, expert_M: Tensor, num_rows_per_expert: list[int]
    ) -> tuple[ExpertRows, Tensor]:
        """See `RowFormat`."""
        order_M = torch.argsort(expert_M, stable=True)
        places_M = torch.empty_like(order_M)
        places_M[order_M] = torch.arange(order_M.shape[0], device=order_M.device)
        sorted_MD = plain(rows).index_select(0, order_M)
        return ExpertRows(rows_MD=sorted_MD, num_rows_per_expert=num_rows_per_expert), places_M


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedPairs:
    """Places of the pairs of token and expert, and their weights [T, K] float32."""

    alignment: Alignment
    topk_weights_TK: Tensor


@dataclass(frozen=True, slots=True)
class AlignedQuantized:
    """Quantised rows in the layout of `engine.kernels.alignment`; they travel packed.

    A pair gets its row on the device, and the host never waits for how many there are.
    """

    ops: Ops
    codec: RowCodec
    share: ExpertShare
    takes_quantized = True
    waits_for_counts = False

    def pack(self, hidden: Activation) -> Tensor:
        """See `RowFormat`."""
        return self.codec.pack(quantized(hidden))

    def unpack(self, message: Tensor, like: Activation) -> Activation:
        """See `RowFormat`."""
        return self.codec.unpack(message, quantized(like).data_TK.shape[1])

    def plan(self, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> AlignedPairs:
        """See `RowFormat`."""
        share = self.share
        capacity = row_capacity(topk_ids_TK.numel(), share.num_local, share.num_ranks)
        alignment = self.ops[MOE_ALIGN_BLOCK_SIZE](
            topk_ids_TK, share.first, share.num_local, capacity
        )
        return AlignedPairs(alignment=alignment, topk_weights_TK=topk_weights_TK)

    def permute(self, rows: Activation, plan: AlignedPairs) -> AlignedRows:
        """See `RowFormat`."""
        return AlignedRows.permute(self.ops, quantized(rows), plan.alignment)

    def unpermute(self, expert_out_MD: Tensor, plan: AlignedPairs, own_TD: Tensor | None) -> Tensor:
        """See `RowFormat`."""
        return self.ops[UNPERMUTE_ROWS](expert_out_MD, plan.alignment, plan.topk_weights_TK, own_TD)

    def pair_rows(
        self, expert_out_MD: Tensor, plan: AlignedPairs, own_ids_TK: Tensor
    ) -> PairRows | None:
        """See `RowFormat`."""
        return PairRows.placed(
            expert_out_MD,
            plan.alignment,
            plan.topk_weights_TK,
            own_ids_TK=own_ids_TK,
            num_local_experts=self.share.num_local,
        )

    def sort(
        self, rows: Activation, expert_M: Tensor, num_rows_per_expert: list[int]
    ) -> tuple[AlignedRows, Tensor]:
        """See `RowFormat`; the layout ends where the rows in use do."""
        num_rows = sum(-(-count // ROW_BLOCK) * ROW_BLOCK for count in num_rows_per_expert)
        counts = self.ops[COUNT_ROWS](expert_M.unsqueeze(1), 0, len(num_rows_per_expert))
        alignment = counts.lay_out(counts.rows_to_lay_out(num_rows))
        aligned = AlignedRows.permute(self.ops, quantized(rows), alignment)
        return aligned, alignment.rows_TK.flatten().long()


def choose_row_format(number_format: NumberFormat, ops: Ops, share: ExpertShare) -> RowFormat[Any]:
    """Return the form of rows that experts in a format multiply, in the contiguous layout."""
    if number_format.rows is None:
        return PlainRows(share)
    return AlignedQuantized(ops, number_format.rows, share)


def sort_by_expert(
    topk_ids_TK: Tensor, topk_weights_TK: Tensor, first: int, num_experts: int
) -> SortedPairs:
    """Sort (token, expert) pairs by expert, keeping those of experts [first, first + num_experts).

    Args:
        topk_ids_TK: [T, K] int64.
        topk_weights_TK: [T, K] float32.
        first: lowest expert to keep.
        num_experts: how many to keep.
    """
    num_tokens, top_k = topk_ids_TK.shape
    ids = topk_ids_TK.reshape(-1) - first
    order = torch.argsort(ids, stable=True)
    # Experts below `first` sort to the front and those above to the back.
    counts = torch.bincount((ids + 1).clamp(0, num_experts + 1), minlength=num_experts + 2).tolist()
    order = order[counts[0] : order.shape[0] - counts[-1]]
    return SortedPairs(
        token_M=torch.div(order, top_k, rounding_mode="floor"),
        weight_M=topk_weights_TK.reshape(-1)[order],
        num_rows_per_expert=counts[1:-1],
        num_tokens=num_tokens,
    )


def sum_per_token(rows_MD: Tensor, pairs: SortedPairs, own_TD: Tensor | None) -> Tensor:
    """Return [T, D]: the weighted sum of each token's rows, plus `own_TD`.

    The sum is made in float32 and returned in the rows' dtype.
    """
    if own_TD is None:
        out_TD = rows_MD.new_zeros((pairs.num_tokens, rows_MD.shape[1]), dtype=torch.float32)
    else:
        out_TD = own_TD.to(torch.float32, copy=True)
    out_TD.index_add_(0, pairs.token_M, rows_MD.float() * pairs.weight_M.unsqueeze(1))
    return out_TD.to(rows_MD.dtype)
