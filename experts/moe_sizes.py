"""What plans need to know of a model with experts."""

from __future__ import annotations

from typing import Protocol


class MoESizes(Protocol):
    """Sizes and routing, by the names of a checkpoint's ``config.json``.

    Attributes:
        n_routed_experts: E, experts of a layer.
        num_experts_per_tok: experts of a token.
        n_group: groups of neighbouring experts.
        topk_group: groups that a token's experts may lie in.
        hidden_size: numbers of a token's hidden state.
        moe_intermediate_size: columns of an expert.
        num_moe_layers: layers with experts, without those that draft.
    """

    @property
    def n_routed_experts(self) -> int: ...  # noqa: D102
    @property
    def num_experts_per_tok(self) -> int: ...  # noqa: D102
    @property
    def n_group(self) -> int: ...  # noqa: D102
    @property
    def topk_group(self) -> int: ...  # noqa: D102
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def moe_intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def num_moe_layers(self) -> int: ...  # noqa: D102
