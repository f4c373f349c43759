"""What plans need to know of a model with experts."""

from __future__ import annotations

from typing import Protocol


class MoESizes(Protocol):
    """Sizes and routing, by the names of a checkpoint's ``config.json``."""

    @property
    def n_routed_experts(self) -> int:
        """E, experts of a layer."""
        ...

    @property
    def num_experts_per_tok(self) -> int:
        """Experts of a token."""
        ...

    @property
    def n_group(self) -> int:
        """Groups of neighbouring experts."""
        ...

    @property
    def topk_group(self) -> int:
        """Groups that a token's experts may lie in."""
        ...

    @property
    def hidden_size(self) -> int:
        """Numbers of a token's hidden state."""
        ...

    @property
    def moe_intermediate_size(self) -> int:
        """Columns of an expert."""
        ...

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, without those that draft; counted, not a field."""
        ...
