"""Which of MLA's two forms a sequence attends in, and how much the absorbed one does at a time."""

from dataclasses import dataclass
from typing import Final

from engine.config import DeepseekV3Config

ABSORBED_BYTES: Final = 256 << 20
"""Enough for 740 tokens of 128 heads, or for the scores of one query of 128 heads at 260k."""

_SCORE_BYTES = 8  # in float32, and as a probability
_NUMBER_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """When the absorbed form is taken: when it costs less, by multiply-adds.

    Attributes:
        heads: H of this rank.
        nope: N.
        rope: R.
        value: V.
        latent: C.
        absorbed_cost: how much dearer a multiply-add of the absorbed form is; 0 always takes the
            absorbed form, infinity never.
        absorbed_bytes: that the absorbed form may take at a time beside what it reads from the
            pool, in a step that is not one of single queries. What is more waits for its turn.
    """

    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    absorbed_cost: float = 1.0
    absorbed_bytes: int = ABSORBED_BYTES

    @classmethod
    def of(
        cls, config: DeepseekV3Config, *, tp: int = 1, absorbed_cost: float = 1.0
    ) -> "AttentionRule":
        """Return the rule for a model's head sizes on one of `tp` ranks."""
        return cls(
            heads=config.num_attention_heads // tp,
            nope=config.qk_nope_head_dim,
            rope=config.qk_rope_head_dim,
            value=config.v_head_dim,
            latent=config.kv_lora_rank,
            absorbed_cost=absorbed_cost,
        )

    def takes_absorbed(self, num_queries: int, num_positions: int) -> bool:
        """Decide for a sequence that runs `num_queries` of its `num_positions` tokens.

        Costs are multiply-adds per head. A single query is always absorbed, so that decode steps
        have one shape.
        """
        if num_queries == 1 and self.absorbed_cost != float("inf"):
            return True
        expand = self.latent * (self.nope + self.value)
        pairs = num_queries * num_positions
        decompressed = num_positions * expand + pairs * (self.nope + self.rope + self.value)
        absorbed = num_queries * expand + pairs * (2 * self.latent + self.rope)
        return absorbed * self.absorbed_cost < decompressed

    def most_absorbed(self, num_positions: int) -> int:
        """Return the most queries with which a sequence of `num_positions` is absorbed, or 0.

        Fewer queries of as many positions are absorbed too: each makes the absorbed form dearer
        by as much.
        """
        low, high = 0, num_positions
        while low < high:
            middle = (low + high + 1) // 2
            if self.takes_absorbed(middle, num_positions):
                low = middle
            else:
                high = middle - 1
        return low

    def queries_at_once(self, num_positions: int) -> int:
        """Return of how many queries the scores fit, where all scores are kept; at least 1.

        Args:
            num_positions: of all sequences that attend together, padding included.
        """
        per_query = _SCORE_BYTES * self.heads * max(1, num_positions)
        return max(1, self.absorbed_bytes // per_query)

    def tokens_at_once(self) -> int:
        """Return how many tokens fit, where none of the scores is kept; at least 1.

        Of each there are queries, the same in the latent space, what they attended to there, and
        that taken out of it.
        """
        numbers = self.nope + self.rope + self.latent + self.rope + self.latent + self.value
        return max(1, self.absorbed_bytes // (_NUMBER_BYTES * self.heads * numbers))
