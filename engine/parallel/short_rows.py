"""Quantised rows of short steps in the masked layout, of all others in the contiguous one.

The contiguous layout gives every expert that has a row a whole tile of 128 of them, and its GEMM
multiplies the tile whatever is in it: with 64 tokens an expert has 2. In the masked layout the
streamed GEMM reads the same weights and multiplies a tile of 32 rows, as it does in decode
(`engine.formats.expert_stream`). Which of the two a step takes follows from how many tokens it has,
which all ranks know before anything travels; it is decided here and nowhere else.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

from torch import Tensor

from engine.formats.expert_rows import AlignedRows, quantized
from engine.formats.fp8_rows import Activation
from engine.kernels.masked_rows import MaskedPlaces, MaskedRows, guess_rows, max_masked_rows
from engine.ops.masked import MOE_ALIGN_MASKED, PERMUTE_MASKED_ROWS
from engine.ops.op import Ops
from engine.ops.permute import UNPERMUTE_ROWS
from engine.parallel.pair_rows import PairRows
from engine.parallel.row_formats import AlignedPairs, AlignedQuantized, ExpertShare

MOST_EXPECTED_ROWS: Final = 16
"""Of an expert, in the mean: for so many there are tiles of the streamed GEMM
(`engine.formats.expert_stream.tiles.MEASURED`). With more, tiles of 128 rows are filled better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedPairs:
    """Places of the pairs of token and expert, and their weights [T, K] float32."""

    places: MaskedPlaces
    topk_weights_TK: Tensor


def most_masked_tokens(wanted: int, top_k: int, num_experts: int) -> int:
    """Return the most tokens of a step that is laid out masked, where up to `wanted` may be."""
    return min(wanted, MOST_EXPECTED_ROWS * num_experts // top_k)


ShortPlan: TypeAlias = MaskedPairs | AlignedPairs


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortQuantized:
    """A `RowFormat`: masked rows in steps of at most `max_tokens` tokens, else `aligned`.

    Attributes:
        ops: of the rank.
        aligned: of the same experts; also says what travels.
        max_tokens: most tokens of a short step, those of all ranks that it comes from together. The
            masked layout has room for each of them at each expert.
    """

    ops: Ops
    aligned: AlignedQuantized
    max_tokens: int
    takes_quantized = True
    waits_for_counts = False

    @property
    def share(self) -> ExpertShare:
        """See `RowFormat`."""
        return self.aligned.share

    def is_short(self, num_tokens: int, top_k: int) -> bool:
        """Return whether a step of [T, K] choices is laid out masked."""
        num_experts = self.share.num_local * self.share.num_ranks
        expected_rows = guess_rows(num_tokens, top_k, num_experts)
        return num_tokens <= self.max_tokens and expected_rows <= MOST_EXPECTED_ROWS

    def pack(self, hidden: Activation) -> Tensor:
        """See `RowFormat`."""
        return self.aligned.pack(hidden)

    def unpack(self, message: Tensor, like: Activation) -> Activation:
        """See `RowFormat`."""
        return self.aligned.unpack(message, like)

    def plan(self, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> ShortPlan:
        """See `RowFormat`; nothing is read from the device."""
        num_tokens, top_k = topk_ids_TK.shape
        if not self.is_short(num_tokens, top_k):
            return self.aligned.plan(topk_ids_TK, topk_weights_TK)
        share = self.share
        places = self.ops[MOE_ALIGN_MASKED](
            topk_ids_TK,
            share.first,
            share.num_local,
            max_masked_rows(num_tokens),
            expected_rows=guess_rows(num_tokens, top_k, share.num_local * share.num_ranks),
        )
        return MaskedPairs(places=places, topk_weights_TK=topk_weights_TK)

    def permute(self, rows: Activation, plan: ShortPlan) -> AlignedRows | MaskedRows:
        """See `RowFormat`."""
        match plan:
            case MaskedPairs():
                return self.ops[PERMUTE_MASKED_ROWS](quantized(rows), plan.places)
            case AlignedPairs():
                return self.aligned.permute(rows, plan)

    def unpermute(self, expert_out_MD: Tensor, plan: ShortPlan, own_TD: Tensor | None) -> Tensor:
        """See `RowFormat`; of masked rows [L, M, D]."""
        match plan:
            case MaskedPairs():
                out_MD = expert_out_MD.flatten(0, 1)
                weights = plan.topk_weights_TK
                return self.ops[UNPERMUTE_ROWS](out_MD, plan.places, weights, own_TD)
            case AlignedPairs():
                return self.aligned.unpermute(expert_out_MD, plan, own_TD)

    def pair_rows(
        self, expert_out_MD: Tensor, plan: ShortPlan, own_ids_TK: Tensor
    ) -> PairRows | None:
        """See `RowFormat`; of masked rows [L, M, D]."""
        match plan:
            case MaskedPairs():
                return PairRows.placed(
                    expert_out_MD.flatten(0, 1),
                    plan.places,
                    plan.topk_weights_TK,
                    own_ids_TK=own_ids_TK,
                    num_local_experts=self.share.num_local,
                )
            case AlignedPairs():
                return self.aligned.pair_rows(expert_out_MD, plan, own_ids_TK)

    def sort(
        self, rows: Activation, expert_M: Tensor, num_rows_per_expert: list[int]
    ) -> tuple[AlignedRows, Tensor]:
        """See `RowFormat`: rows that came one by one are laid out as there are, aligned."""
        return self.aligned.sort(rows, expert_M, num_rows_per_expert)
