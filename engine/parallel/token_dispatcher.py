"""The seam between routing and experts: bring tokens to the experts they chose, and back.

A dispatch returns rows for this rank's experts and a handle; a combine consumes the handle and the
experts' output. Both are started and waited for, so that other work covers the journey. The key
idea: the MoE layer is the same whichever way tokens travel, and an implementation is chosen once,
when the model is built.

Legend: T tokens of this rank, D hidden size, K experts per token, L local physical experts,
M rows received by them (a token counts once for each of its local experts).
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.kernels.fp8_rows import Activation
from engine.parallel.expert_rows import Rows
from engine.parallel.pending import Pending

Handle = TypeVar("Handle")


class TokenDispatcher(Protocol[Handle]):
    """One way for tokens to travel. Each dispatch is followed by its combine.

    Ranks make the same calls in the same order. Two micro-batches of prefill may be under way at a
    time; steps of decode start a transfer when the one before it has been waited for.

    Attributes:
        takes_fp8: whether `start_dispatch` takes FP8 rows.
        waits_for_counts: whether the `wait` of a dispatch stops the host until the device has come
            so far and said how many rows there are. A step then takes as long to launch as to run
            (`ModelRunner.launch`). Otherwise nothing here ever reads the device.
    """

    takes_fp8: bool
    waits_for_counts: bool

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[Rows, Handle]]:
        """Start to bring tokens to their experts.

        Args:
            hidden: [T, D]; T may be 0, and the call must still be made. FP8 rows if, and only if,
                `takes_fp8`.
            topk_ids_TK: [T, K] int64 physical experts, no expert twice in a row; -1 for none. Such
                a pair goes nowhere and adds nothing, whatever its weight, and of a token whose
                experts all are -1 nothing is read.
            topk_weights_TK: [T, K] float32.

        Returns:
            The rows for this rank's experts, and what `start_combine` needs to undo it.
        """
        ...

    def start_combine(
        self, expert_out_MD: Tensor, handle: Handle, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """Start to bring the experts' output home and sum it, weighted, per token.

        Args:
            expert_out_MD: [M, D], in the order of the rows that the dispatch returned; for
                `MaskedRows` [L, M, D].
            handle: of the dispatch.
            own: [T, D] or None, a term that this rank adds of itself (the shared expert); waited
                for as late as possible, and left unchanged. On ranks that hold the same tokens it
                is this rank's part of a sum over the ranks, so that both terms share one reduction.

        Returns:
            [T, D], complete; `own` alone, or zeros, for a token without an expert.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRows:
    """Rows sorted by expert, with the way back: what `sort_by_expert` returns.

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


def sort_by_expert(
    topk_ids_TK: Tensor, topk_weights_TK: Tensor, first: int, num_experts: int
) -> RoutedRows:
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
    return RoutedRows(
        token_M=torch.div(order, top_k, rounding_mode="floor"),
        weight_M=topk_weights_TK.reshape(-1)[order],
        num_rows_per_expert=counts[1:-1],
        num_tokens=num_tokens,
    )


def sum_per_token(rows_MD: Tensor, routed: RoutedRows, own_TD: Tensor | None) -> Tensor:
    """Return [T, D]: the weighted sum of each token's rows, plus `own_TD`.

    The sum is made in float32 and returned in the rows' dtype.
    """
    if own_TD is None:
        out_TD = rows_MD.new_zeros((routed.num_tokens, rows_MD.shape[1]), dtype=torch.float32)
    else:
        out_TD = own_TD.to(torch.float32, copy=True)
    out_TD.index_add_(0, routed.token_M, rows_MD.float() * routed.weight_M.unsqueeze(1))
    return out_TD.to(rows_MD.dtype)
