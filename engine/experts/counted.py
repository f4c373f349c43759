"""The experts of a running rank: what they are, where they stand, and the count of their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.experts.counter import ExpertCounter
from engine.parallel.groups import RankGroup

if TYPE_CHECKING:
    from engine.config import DeepseekV3Config
    from engine.experts.placements import ExpertPlacements


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedExperts:
    """See the module.

    Attributes:
        counter: of the tokens that this rank's gates score.
        placements: of the layers of the counter, in the same order.
        config: sizes and routing.
        expert_bytes: of one expert's weights and scales in one layer, as this rank keeps them.
        num_ranks: that share the experts of a layer.
        sharing: ranks of which each counts a share of the rows that all of them run; one where
            this rank counts all.
    """

    counter: ExpertCounter
    placements: ExpertPlacements
    config: DeepseekV3Config
    expert_bytes: int
    num_ranks: int
    sharing: RankGroup = field(default_factory=RankGroup)

    @property
    def num_draft_layers(self) -> int:
        """How many of the counter's last layers draft."""
        last = self.config.num_hidden_layers
        return sum(layer >= last for layer in self.counter.layers)
