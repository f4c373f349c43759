"""Decode without DeepEP: every rank sees all tokens, takes those of its experts, and sums go back.

For CPUs, and for GPUs that DeepEP cannot run on. Ranks pad to the same number of tokens and gather
rows and routing in one message; rows are placed into the masked layout, and what comes home is one
sum per token and rank, added up by a reduce-scatter. The key idea: that number is a constant, so
with NCCL the whole exchange can be captured in a CUDA graph, and it does not matter which ranks
replay one, or of which batch size. The price: padding travels too, and R - 1 copies of a token,
where DeepEP moves one per chosen expert.

A message row: the token in FP8 with its scales, padded to 16 bytes; its K physical experts int64;
their weights float32; and padding to 16 bytes again.

Letters: R ranks, T tokens of a rank after padding, D hidden size, K experts per token, L local
experts, M rows per local expert.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.formats.expert_rows import quantized
from engine.formats.fp8_rows import Activation, Fp8Rows, packed_row_bytes
from engine.invariants import require
from engine.kernels.base import Kernels
from engine.kernels.masked_rows import (
    MaskedPlaces,
    MaskedRoom,
    MaskedRows,
    guess_rows,
    max_masked_rows,
)
from engine.ops.masked import MOE_ALIGN_MASKED, PERMUTE_MASKED_ROWS
from engine.ops.permute import UNPERMUTE_ROWS
from engine.parallel.groups import RankGroup
from engine.parallel.pending import Pending, Then


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedGatheredHandle:
    """The way back.

    Attributes:
        places: of the pairs of all ranks' tokens.
        topk_weights: [R * T, K] float32, of all ranks' tokens.
        num_tokens: of this rank, without padding.
    """

    places: MaskedPlaces
    topk_weights: Tensor
    num_tokens: int


class MaskedGatheredDispatcher:
    """See the module."""

    takes_quantized = True
    waits_for_counts = False

    def __init__(
        self,
        kernels: Kernels,
        num_local_experts: int,
        ep_group: RankGroup,
        *,
        max_tokens_per_rank: int,
    ) -> None:
        """Take what is the same on all ranks of `ep_group`, but for the kernels.

        Args:
            kernels: of this rank.
            num_local_experts: L.
            ep_group: the ranks.
            max_tokens_per_rank: T; a rank alone does not pad.
        """
        self._kernels, ops = kernels, kernels.ops
        self._moe_align_masked = ops[MOE_ALIGN_MASKED]
        self._permute_masked_rows = ops[PERMUTE_MASKED_ROWS]
        self._unpermute_rows = ops[UNPERMUTE_ROWS]
        self._num_local_experts = num_local_experts
        self._group = ep_group
        self._max_tokens_per_rank = max_tokens_per_rank

    def masked_room(self, num_tokens: int, top_k: int) -> MaskedRoom:
        """See `MaskingDispatcher`."""
        size = self._group.size
        # Padding needs room in the message, and chooses no expert.
        return MaskedRoom(
            max_masked_rows(size * self._padded(num_tokens)),
            guess_rows(size * num_tokens, top_k, size * self._num_local_experts),
        )

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[MaskedRows, MaskedGatheredHandle]]:
        """See `TokenDispatcher`; at most `max_tokens_per_rank` tokens."""
        rows = quantized(hidden)
        num_tokens, top_k = topk_ids_TK.shape
        message = _pack(rows, topk_ids_TK, topk_weights_TK, self._padded(num_tokens))
        gathering = self._group.start_all_gather(message)
        num_columns = rows.data_TK.shape[1]

        def receive(gathered: Tensor) -> tuple[MaskedRows, MaskedGatheredHandle]:
            all_rows, ids, weights = _unpack(gathered, num_columns, top_k)
            places = self._place(ids, self.masked_room(num_tokens, top_k))
            handle = MaskedGatheredHandle(
                places=places, topk_weights=weights, num_tokens=num_tokens
            )
            return self._permute_masked_rows(all_rows, places), handle

        return Then(gathering, receive)

    def start_combine(
        self, expert_out_LMD: Tensor, handle: MaskedGatheredHandle, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """See `TokenDispatcher`; `own` is complete for this rank's tokens."""
        partial = self._unpermute_rows(
            expert_out_LMD.flatten(0, 1), handle.places, handle.topk_weights, None
        )
        reducing = self._group.start_reduce_scatter(partial)

        def receive(all_TD: Tensor) -> Tensor:
            summed_TD = all_TD[: handle.num_tokens]
            return summed_TD if own is None else summed_TD + own.wait()

        return Then(reducing, receive)

    def _padded(self, num_tokens: int) -> int:
        num_rows = num_tokens if self._group.size == 1 else self._max_tokens_per_rank
        require(
            num_tokens <= num_rows, "tokens of a rank", num_tokens, f"there is room for {num_rows}"
        )
        return num_rows

    def _place(self, ids: Tensor, room: MaskedRoom) -> MaskedPlaces:
        num_local = self._num_local_experts
        return self._moe_align_masked(
            ids,
            self._group.rank * num_local,
            num_local,
            room.max_rows,
            expected_rows=room.expected_rows,
        )


def _pack(rows: Fp8Rows, topk_ids_TK: Tensor, topk_weights_TK: Tensor, num_rows: int) -> Tensor:
    """Return the message [num_rows, bytes] uint8; rows beyond the tokens choose no expert."""
    num_tokens, top_k = topk_ids_TK.shape
    num_columns = rows.data_TK.shape[1]
    message = torch.empty(
        (num_rows, _message_bytes(num_columns, top_k)), dtype=torch.uint8, device=topk_ids_TK.device
    )
    packed, ids, weights = _unpack(message, num_columns, top_k)
    packed.data_TK.view(torch.uint8)[:num_tokens] = rows.data_TK.view(torch.uint8)
    packed.scale_TG[:num_tokens] = rows.scale_TG
    ids[:num_tokens] = topk_ids_TK
    weights[:num_tokens] = topk_weights_TK
    ids[num_tokens:] = -1
    weights[num_tokens:] = 0.0
    return message


def _unpack(message: Tensor, num_columns: int, top_k: int) -> tuple[Fp8Rows, Tensor, Tensor]:
    """Return views: rows, physical experts [T, K] and weights [T, K]."""
    ids = packed_row_bytes(num_columns)
    weights, end = ids + 8 * top_k, ids + 12 * top_k
    return (
        Fp8Rows.packed(message[:, :ids], num_columns),
        message[:, ids:weights].view(torch.int64),
        message[:, weights:end].view(torch.float32),
    )


def _message_bytes(num_columns: int, top_k: int) -> int:
    return -(-(packed_row_bytes(num_columns) + 12 * top_k) // 16) * 16
