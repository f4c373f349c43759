"""Token embedding and output head, whole on every rank.

Both could be split over the vocabulary. They are not, on purpose: an embedding look-up is free, the
head runs on a handful of rows, and with a whole head the ranks of a tp group need no collective
outside the forward pass, so only the rank that samples computes logits. The price for the full
model is 3.7 GB a rank in bf16.
"""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels import few_rows
from engine.layers.context import LayerContext
from engine.weights.slices import WeightSlice


class VocabEmbedding(nn.Module):
    """One vector per token id."""

    def __init__(self, ctx: LayerContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = ctx.parameter(vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map [T] int64 to [T, hidden_size]."""
        return F.embedding(token_ids, self.weight)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """See `HoldsWeights`."""
        yield WeightSlice.whole(f"{prefix}.weight", self.weight)


class LMHead(nn.Module):
    """Hidden states to logits; shares the embedding's weight if `tied_to` is given."""

    def __init__(
        self,
        ctx: LayerContext,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: VocabEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.tied = tied_to is not None
        self.weight = tied_to.weight if tied_to else ctx.parameter(vocab_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [L, hidden_size] to float32 logits [L, vocab_size]."""
        return few_rows.linear(hidden, self.weight).float()

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """See `HoldsWeights`; a tied head owns nothing."""
        if not self.tied:
            yield WeightSlice.whole(f"{prefix}.weight", self.weight)
