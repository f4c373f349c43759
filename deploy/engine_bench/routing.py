"""Experts chosen evenly: a `Kernels` whose routing gives every expert the same number of rows.

A trained router is balanced by its bias; invented weights are not, the deeper the less, and a
measurement would then be one of their imbalance. The real operation still runs and its weights are
used; only the experts' numbers are replaced, by a table made beforehand. The table keeps to the
rule: experts of a token lie in `topk_group` groups, and are different.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.kernels.base import Kernels
from engine.kernels.routing import RoutingRule


class EvenRouting:
    """Wraps the kernels of a rank; everything but the choice of experts is theirs."""

    def __init__(self, kernels: Kernels, table_TK: Tensor) -> None:
        self._kernels = kernels
        self._table_TK = table_TK

    def group_limited_topk(
        self, logits_TE: Tensor, bias_E: Tensor, rule: RoutingRule, num_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the experts of the table, and the weights of those that were really chosen.

        Batches that are measured are full, so there is no padding to leave out.
        """
        _, weights_TK = self._kernels.group_limited_topk(logits_TE, bias_E, rule, num_rows)
        return self._table_TK[: weights_TK.shape[0]], weights_TK

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


def even_experts(
    config: ModelConfig, num_tokens: int, *, rank: int = 0, num_ranks: int = 1
) -> Tensor:
    """Return [num_tokens, K] int64: every expert equally often, in a random order of tokens.

    Ranks with their own tokens share one table, and take its rows in turns: what a few tokens of
    each need is even together. Each run of as many tokens as there are experts is even by itself,
    so that the leading rows of the table are, where fewer tokens come.
    """
    return _table(config, num_tokens * num_ranks)[rank::num_ranks].contiguous()


def _table(config: ModelConfig, num_tokens: int) -> Tensor:
    groups, top_k = config.n_group, config.num_experts_per_tok
    size = config.n_routed_experts // groups
    per_group = -(-top_k // config.topk_group)
    token = torch.arange(num_tokens).unsqueeze(1)
    choice = torch.arange(top_k).unsqueeze(0)
    # Token t visits groups t, t + 1, ...; its round t // groups says which experts it takes there.
    group = (token + choice // per_group) % groups
    within = (token // groups * per_group + choice % per_group) % size
    generator = torch.Generator().manual_seed(0)
    firsts = range(0, num_tokens, config.n_routed_experts)
    lengths = [min(config.n_routed_experts, num_tokens - first) for first in firsts]
    order = [
        torch.randperm(length, generator=generator) + first
        for first, length in zip(firsts, lengths, strict=True)
    ]
    return (group * size + within)[torch.cat(order)]
