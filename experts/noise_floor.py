"""How even ranks can be at all: the balancedness of a router without any preference.

Even where every expert is as likely as another, a batch of few tokens does not load ranks evenly,
and no placement helps against that. So a measured balancedness is told as a share of this floor.
It is drawn, not computed: each token takes `topk_group` of the groups and `top_k` of their experts,
without replacement, all alike. A seed makes it repeatable.

Letters in shapes: M drawn passes, T tokens, G groups, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from experts.balancedness import (
    Balancedness,
    balancedness_of,
    even_placement,
    rank_rows,
)
from experts.moe_sizes import MoESizes

if TYPE_CHECKING:
    from numpy.typing import NDArray


_MOST_TOKENS: Final = 2048
"""Of a drawn pass. Deviations of more tokens are normal and grow by the root of their number."""
_ALL_TOKENS: Final = 2**16
"""Of all drawn passes: a quarter of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The rule by which a token chooses.

    Attributes:
        num_experts: E.
        top_k: experts of a token.
        num_groups: G, groups of neighbouring experts.
        topk_group: groups that a token's experts may lie in.
    """

    num_experts: int
    top_k: int
    num_groups: int = 1
    topk_group: int = 1

    @classmethod
    def of(cls, config: MoESizes) -> Routing:
        """Return a model's rule."""
        return cls(
            num_experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            num_groups=config.n_group,
            topk_group=config.topk_group,
        )


class UniformPasses:
    """Passes of uniform routing, drawn once and held against batches of any size.

    For whoever asks again and again: drawing takes a tenth of a second, a floor a millisecond.
    """

    def __init__(self, routing: Routing, *, num_tokens: int, seed: int = 0) -> None:
        """Draw passes of so many tokens, or of the most that are drawn."""
        self._routing, self._seed = routing, seed
        self._tokens = min(max(num_tokens, 1), _MOST_TOKENS)
        self._drawn_ME = _draw(routing, self._tokens, np.random.default_rng(seed))

    def floor(
        self,
        *,
        tokens_per_pass: float,
        num_ranks: int,
        num_slots: int,
        num_layers: int = 1,
        num_passes: int = 1,
    ) -> Balancedness:
        """Return the floor of passes of another number of tokens; arguments as of `noise_floor`."""
        counts_ME = self._of_tokens(max(round(tokens_per_pass), 1))
        placement = even_placement(self._routing.num_experts, num_slots, num_ranks)[None]
        rows_MR = rank_rows(counts_ME[:, None], placement, num_ranks)[:, 0]
        # Layers and passes are drawn from the pool again: they are alike and know nothing of
        # another.
        generator = np.random.default_rng((self._seed, 1))
        chosen_NL = generator.integers(0, len(rows_MR), (min(num_passes, 256), num_layers))
        spread = balancedness_of(rows_MR[chosen_NL])
        pool = balancedness_of(rows_MR[:, None])
        return Balancedness(
            overall=pool.overall,
            worst_layer=min(spread.worst_layer, pool.overall),
            worst_layer_index=spread.worst_layer_index,
        )

    def _of_tokens(self, tokens: int) -> NDArray[np.int64]:
        """Return [M, E] int64: deviations grow by the root of the tokens."""
        drawn, routing = self._tokens, self._routing
        if drawn == tokens:
            return self._drawn_ME
        mean = tokens * routing.top_k / routing.num_experts
        deviation_ME = self._drawn_ME - drawn * routing.top_k / routing.num_experts
        scaled_ME = np.rint(mean + deviation_ME * (tokens / drawn) ** 0.5)
        whole_ME: NDArray[np.int64] = np.maximum(scaled_ME, 0).astype(np.int64)
        return whole_ME


def noise_floor(
    routing: Routing,
    *,
    tokens_per_pass: float,
    num_ranks: int,
    num_slots: int,
    num_layers: int = 1,
    num_passes: int = 1,
    seed: int = 0,
) -> Balancedness:
    """Draw the balancedness of uniform routing, of as many layers and passes.

    Args:
        routing: the model's rule.
        tokens_per_pass: over all ranks; at least one is drawn.
        num_ranks: R.
        num_slots: P, a multiple of the ranks; experts are dealt to them evenly.
        num_layers: of which one is the worst.
        num_passes: over which a layer's sums go.
        seed: of the draws.
    """
    passes = UniformPasses(routing, num_tokens=round(tokens_per_pass), seed=seed)
    return passes.floor(
        tokens_per_pass=tokens_per_pass,
        num_ranks=num_ranks,
        num_slots=num_slots,
        num_layers=num_layers,
        num_passes=num_passes,
    )


def _draw(routing: Routing, tokens: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return [M, E] int64, counts of passes of `tokens` tokens."""
    passes = min(max(_ALL_TOKENS // tokens, 16), 256)
    return np.stack([_one_pass(routing, tokens, generator) for _ in range(passes)])


def _one_pass(routing: Routing, tokens: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return [E] int64, tokens of each expert."""
    groups, size = routing.num_groups, routing.num_experts // routing.num_groups
    order_TG = generator.random((tokens, groups), dtype=np.float32)
    kept_TG = np.argsort(order_TG, axis=1)[:, : routing.topk_group]
    keys_TE = generator.random((tokens, routing.topk_group * size), dtype=np.float32)
    chosen_TK = np.argpartition(keys_TE, routing.top_k - 1, axis=1)[:, : routing.top_k]
    experts_TK = np.take_along_axis(kept_TG, chosen_TK // size, axis=1) * size + chosen_TK % size
    counts_E: NDArray[np.int64] = np.bincount(experts_TK.ravel(), minlength=routing.num_experts)
    return counts_E
