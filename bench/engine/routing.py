"""Who chooses experts: kernels whose routing takes the experts' numbers from tables.

A trained router is balanced by its bias; invented weights are not, the deeper the less, and a
measurement would then be one of their imbalance. The real operation still runs and its weights are
used; only the experts' numbers are replaced, by tables that are made beforehand and keep to the
rule: experts of a token are different, and lie in `topk_group` groups.

*Uniform*: every token draws its experts by itself, so that experts get as many rows in the mean and
no two as many, as with a balanced router: rows are padded to tiles, and the fullest rank is waited
for. Every layer has its own draws, and every step other ones. *Even*: every expert gets as many
rows, in multiples of the tiles where the batch is one: no padding, no skew. That is a bound.
*Skewed*: some experts of a layer are likelier than others, by a synthetic skew like a published one
(`bench.experts.skew`), the same at every step and on all ranks. What is counted, and planned from,
is the choice that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from engine.config import DeepseekV3Config
from engine.kernels.base import Kernels
from engine.operations import do_nothing
from engine.ops.gate import GROUP_LIMITED_TOPK
from engine.ops.routing_rule import RoutingRule

MAX_STEPS = 64
"""Of different draws; then they come again."""
MAX_BYTES = 512 * 2**20
"""Of draws of all steps on a device, but for those of two steps, which there always are."""


class RoutingTables:
    """Experts of the tokens of a step, call by call.

    The tables of a step lie where those of the one before did, so that a captured step reads them.
    """

    def __init__(self, draws_SCTK: Tensor, *, num_rows: int | None = None) -> None:
        """Take tables of S steps, C calls of each and T tokens of a call; then they come again.

        Args:
            draws_SCTK: experts; changed.
            num_rows: of every call, tokens behind so many are padding, which goes to no expert;
                None where calls differ in that.
        """
        self.knows_padding = num_rows is not None
        if num_rows is not None:
            draws_SCTK[:, :, num_rows:] = -1
        self._draws = draws_SCTK
        self._current = draws_SCTK[0].clone()
        self._step = self._call = 0

    def begin_step(self) -> None:
        """Issue the change to the next step's tables to the current stream."""
        self._call = 0
        if len(self._draws) > 1:
            self._step = (self._step + 1) % len(self._draws)
            self._current.copy_(self._draws[self._step])

    @property
    def draws(self) -> Tensor:
        """[S, C, T, K] of all steps."""
        return self._draws

    def redraw(self, draws_SCTK: Tensor) -> None:
        """Go on with other tables, as large ones."""
        assert draws_SCTK.shape == self._draws.shape, draws_SCTK.shape
        self._draws = draws_SCTK

    def take(self, num_tokens: int, bias_E: Tensor | None = None) -> Tensor:
        """The experts of the next call, [num_tokens, K] int64; `bias_E` is that of its gate."""
        table = self._current[self._call % len(self._current)]
        self._call += 1
        assert num_tokens <= len(table), (num_tokens, len(table))
        return table[:num_tokens]


class LayerTables(RoutingTables):
    """The same where layers differ in more than their draws: a gate is known by its bias."""

    def __init__(
        self,
        draws_SLTK: Tensor,
        layer_of: Mapping[int, int],
        *,
        num_rows: int | None = None,
    ) -> None:
        """Take tables of S steps, L layers and T tokens.

        Args:
            draws_SLTK: experts; changed.
            layer_of: the place of a layer, by the address of the bias of its gate.
            num_rows: see `RoutingTables`.
        """
        super().__init__(draws_SLTK, num_rows=num_rows)
        self._has_padding = num_rows is not None and num_rows < draws_SLTK.shape[2]
        self._layer_of, self._rows_taken = layer_of, [0] * len(self._current)

    def begin_step(self) -> None:
        """See `RoutingTables`."""
        super().begin_step()
        self._rows_taken = [0] * len(self._current)

    def take(self, num_tokens: int, bias_E: Tensor | None = None) -> Tensor:
        """See `RoutingTables`; a second micro-batch gets the rows behind those of the first."""
        assert bias_E is not None
        layer = self._layer_of[bias_E.data_ptr()]
        table, first = self._current[layer], self._rows_taken[layer]
        assert num_tokens <= len(table), (num_tokens, len(table))
        if self._has_padding or first + num_tokens > len(table):
            first = 0
        self._rows_taken[layer] = first + num_tokens
        return table[first : first + num_tokens]


class TableRouting:
    """Replaces the choice of experts.

    Attributes:
        tables: in use; None for the router's own choice.
        counts_tables: whether gates count the choice of the tables, not the one they replace.
        kernels: the same as were given, with another choice of experts; use as the model's.
        before: called where experts of a layer are chosen, before tokens travel.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._choose = kernels.ops[GROUP_LIMITED_TOPK]
        ops = kernels.ops.replaced(GROUP_LIMITED_TOPK, self._choose_by_tables)
        self.kernels = replace(kernels, ops=ops)
        self.tables: RoutingTables | None = None
        self.counts_tables = False
        self.before: Callable[[], None] = do_nothing

    def _choose_by_tables(
        self,
        logits_TE: Tensor,
        bias_E: Tensor,
        rule: RoutingRule,
        num_rows: Tensor | int | None = None,
        load_C: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the experts of the tables, and the weights of those that were really chosen.

        Those are counted, too: counting costs what it does in a worker. Where `counts_tables`, the
        tables' are counted instead, by two kernels more in a layer.
        """
        self.before()
        tables, is_told = self.tables, self.tables is not None and self.counts_tables
        counted_C = None if is_told else load_C
        ids_TK, weights_TK = self._choose(logits_TE, bias_E, rule, num_rows, counted_C)
        if tables is None:
            return ids_TK, weights_TK
        own_TK = tables.take(weights_TK.shape[0], bias_E)
        if num_rows is not None and not tables.knows_padding:
            own_TK = torch.where(ids_TK < 0, ids_TK, own_TK)
        if is_told and load_C is not None:
            chosen = own_TK.flatten() % len(load_C)  # -1, which is nothing, to the last bin
            load_C.index_add_(0, chosen, torch.ones_like(chosen))
        return own_TK, weights_TK


def num_draws(config: DeepseekV3Config, num_tokens: int, num_calls: int) -> int:
    """For how many steps draws are made: as many as there is room for, at least two."""
    step_bytes = num_calls * num_tokens * config.num_experts_per_tok * torch.int64.itemsize
    return max(2, min(MAX_STEPS, MAX_BYTES // max(step_bytes, 1)))


def uniform_experts(
    config: DeepseekV3Config, num_tokens: int, generator: torch.Generator
) -> Tensor:
    """Return [num_tokens, K] int64 on the generator's device: each token's own draw.

    First `topk_group` of the groups, each set of them as likely, then K of their experts.
    """
    groups, device = config.n_group, generator.device
    size = config.n_routed_experts // groups
    # In float64, because equals would not be drawn alike.
    keys_TGS = torch.rand(
        (num_tokens, groups, size), dtype=torch.float64, generator=generator, device=device
    )
    if config.topk_group < groups:
        order = torch.rand(
            (num_tokens, groups), dtype=torch.float64, generator=generator, device=device
        )
        kept = order.topk(config.topk_group, dim=1).indices
        left_out = torch.ones_like(order, dtype=torch.bool).scatter_(1, kept, False)
        keys_TGS.masked_fill_(left_out.unsqueeze(2), -1.0)
    return keys_TGS.flatten(1).topk(config.num_experts_per_tok, dim=1).indices


def draw_uniform(
    config: DeepseekV3Config,
    *,
    num_steps: int,
    num_calls: int,
    num_tokens: int,
    generator: torch.Generator,
) -> Tensor:
    """Return [num_steps, num_calls, num_tokens, K] int64, all drawn by themselves."""
    shape = (num_steps, num_calls, num_tokens, config.num_experts_per_tok)
    drawn = torch.empty(shape, dtype=torch.int64, device=generator.device)
    for step in drawn:
        for call in step:
            call.copy_(uniform_experts(config, num_tokens, generator))
    return drawn


def skewed_experts(
    config: DeepseekV3Config, num_tokens: int, log_E: Tensor, generator: torch.Generator
) -> Tensor:
    """Return [num_tokens, K] int64 on the generator's device: likelier experts more often.

    The same draw as the uniform one, with keys that an expert's likelihood moves: a token takes
    the groups whose two best keys are largest together, then the K largest keys in them.

    Args:
        config: of the model.
        num_tokens: how many.
        log_E: float64, the logarithm of each expert's likelihood, up to a constant.
        generator: of the draws.
    """
    groups, device = config.n_group, generator.device
    drawn_TE = torch.rand(
        (num_tokens, config.n_routed_experts),
        dtype=torch.float64,
        generator=generator,
        device=device,
    )
    keys_TE = log_E.to(device) - torch.log(-torch.log(drawn_TE))  # Gumbel: without replacement
    if config.topk_group < groups:
        keys_TGS = keys_TE.view(num_tokens, groups, -1)
        best = keys_TGS.topk(min(2, keys_TGS.shape[2]), dim=2).values.sum(dim=2)
        kept = best.topk(config.topk_group, dim=1).indices
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        keys_TE = keys_TGS.masked_fill(left_out.unsqueeze(2), float("-inf")).flatten(1)
    return keys_TE.topk(config.num_experts_per_tok, dim=1).indices


def draw_skewed(
    config: DeepseekV3Config,
    log_LE: Tensor,
    *,
    num_steps: int,
    num_tokens: int,
    generator: torch.Generator,
) -> Tensor:
    """Return [num_steps, L, num_tokens, K] int64, with the same likelihoods at every step."""
    shape = (num_steps, len(log_LE), num_tokens, config.num_experts_per_tok)
    drawn = torch.empty(shape, dtype=torch.int64, device=generator.device)
    for step in drawn:
        for layer, log_E in zip(step, log_LE, strict=True):
            layer.copy_(skewed_experts(config, num_tokens, log_E, generator))
    return drawn


def even_experts(
    config: DeepseekV3Config, num_tokens: int, *, rank: int = 0, num_ranks: int = 1
) -> Tensor:
    """Return [num_tokens, K] int64: every expert equally often, in a random order of tokens.

    Ranks with their own tokens share one table, and take its rows in turns: what a few tokens of
    each need is even together. Each run of as many tokens as there are experts is even by itself,
    so that the leading rows of the table are, where fewer tokens come.
    """
    return _table(config, num_tokens * num_ranks)[rank::num_ranks].contiguous()


def _table(config: DeepseekV3Config, num_tokens: int) -> Tensor:
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
