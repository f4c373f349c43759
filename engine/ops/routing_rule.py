"""The rule by which a token chooses its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import DeepseekV3Config


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """See `group_limited_topk` for what each field does."""

    top_k: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    @classmethod
    def of(cls, config: DeepseekV3Config) -> RoutingRule:
        """Return the rule of a model."""
        return cls(
            top_k=config.num_experts_per_tok,
            n_group=config.n_group,
            topk_group=config.topk_group,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
        )
