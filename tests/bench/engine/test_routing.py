"""Draws of experts obey the rule of the model; uniform ones are uniform, even ones are even."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bench.engine.routing import (
    MAX_BYTES,
    MAX_STEPS,
    RoutingTables,
    TableRouting,
    draw_uniform,
    even_experts,
    num_draws,
    uniform_experts,
)
from bench.shapes import DEEPSEEK_V3, TINY, expert_shard, tensor_shard
from engine.config import DeepseekV3Config
from engine.kernels.portable import portable_kernels
from engine.ops.gate import GROUP_LIMITED_TOPK
from engine.ops.routing_rule import RoutingRule

SHARDS = [
    shard(DEEPSEEK_V3, ranks=ranks, of=8)
    for shard in (tensor_shard, expert_shard)
    for ranks in (1, 2, 4, 8)
]
FAR = 7.0
"""Standard deviations: among all that is counted here none is so far off by chance."""


@st.composite
def rules(draw: st.DrawFn) -> DeepseekV3Config:
    groups, size = draw(st.sampled_from((1, 2, 4, 8))), draw(st.integers(2, 12))
    kept = draw(st.integers(1, groups))
    return replace(
        TINY,
        n_routed_experts=groups * size,
        n_group=groups,
        topk_group=kept,
        num_experts_per_tok=draw(st.integers(1, kept * size)),
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_obeys(ids_TK: Tensor, config: DeepseekV3Config) -> None:
    size = config.n_routed_experts // config.n_group
    for row in ids_TK.tolist():
        assert len(set(row)) == config.num_experts_per_tok
        assert all(0 <= expert < config.n_routed_experts for expert in row)
        assert len({expert // size for expert in row}) <= config.topk_group


def off_by(counts: Tensor, trials: int, probability: float) -> float:
    """How far the farthest of binomial counts is from its mean, in standard deviations."""
    spread = max((trials * probability * (1 - probability)) ** 0.5, 1e-9)
    return float((counts - trials * probability).abs().max()) / spread


@given(rules(), st.integers(1, 200), st.integers(0, 2**32))
def test_experts_of_a_token_differ_and_lie_in_few_groups(
    config: DeepseekV3Config, num_tokens: int, seed: int
) -> None:
    assert_obeys(even_experts(config, num_tokens), config)
    drawn = uniform_experts(config, num_tokens, seeded(seed))
    assert drawn.shape == (num_tokens, config.num_experts_per_tok)
    assert drawn.dtype == torch.int64
    assert_obeys(drawn, config)


@given(rules(), st.integers(0, 2**32))
def test_every_expert_and_every_group_is_as_likely(config: DeepseekV3Config, seed: int) -> None:
    num_tokens, top_k = 4000, config.num_experts_per_tok
    ids = uniform_experts(config, num_tokens, seeded(seed))
    counts = torch.bincount(ids.flatten(), minlength=config.n_routed_experts)
    assert off_by(counts, num_tokens, top_k / config.n_routed_experts) < FAR
    first = torch.bincount(ids[:, 0], minlength=config.n_routed_experts)
    assert off_by(first, num_tokens, 1 / config.n_routed_experts) < FAR


@pytest.mark.parametrize("config", SHARDS)
def test_rows_of_experts_vary_as_those_of_independent_tokens(config: DeepseekV3Config) -> None:
    rounds, num_tokens = 64, 256
    drawn = draw_uniform(
        config, num_steps=rounds, num_calls=1, num_tokens=num_tokens, generator=seeded(3)
    )
    counts = torch.stack([torch.bincount(ids.flatten(), minlength=config.n_routed_experts)
                          for ids in drawn]).double()  # fmt: skip
    share = config.num_experts_per_tok / config.n_routed_experts
    variance = float(counts.var())
    assert variance == pytest.approx(num_tokens * share * (1 - share), rel=0.15)


@given(rules(), st.integers(0, 2**32))
def test_tokens_draw_by_themselves(config: DeepseekV3Config, seed: int) -> None:
    """Whether a token takes expert 0 says nothing about the next token."""
    ids = uniform_experts(config, 4000, seeded(seed))
    takes = (ids == 0).any(dim=1)
    both = (takes[:-1] & takes[1:]).sum()
    share = config.num_experts_per_tok / config.n_routed_experts
    if share < 1:
        # Neighbouring pairs overlap, which adds to the spread of their number.
        spread = (3999 * share**2 * (1 + 2 * share - 3 * share**2)) ** 0.5
        assert abs(float(both) - 3999 * share**2) < FAR * max(spread, 1.0)


def test_steps_and_calls_have_their_own_draws_and_a_seed_gives_them_again() -> None:
    def draw(seed: int) -> Tensor:
        return draw_uniform(TINY, num_steps=3, num_calls=2, num_tokens=50, generator=seeded(seed))

    drawn = draw(5)
    assert drawn.shape == (3, 2, 50, TINY.num_experts_per_tok)
    tables = drawn.flatten(0, 1)
    same = [torch.equal(a, b) for i, a in enumerate(tables) for b in tables[:i]]
    assert not any(same)
    assert torch.equal(draw(5), drawn)
    assert not torch.equal(draw(6), drawn)


@pytest.mark.parametrize("config", SHARDS)
def test_even_tables_give_every_expert_as_many_rows(config: DeepseekV3Config) -> None:
    ids = even_experts(config, 1024)
    counts = torch.bincount(ids.flatten(), minlength=config.n_routed_experts)
    assert counts.min() == counts.max() == 1024 * ids.shape[1] // config.n_routed_experts
    assert counts.shape == (config.n_routed_experts,)
    leading = torch.bincount(ids[: 2 * config.n_routed_experts].flatten())
    assert leading.min() == leading.max()


def test_few_tokens_a_rank_reach_every_expert_evenly() -> None:
    config = expert_shard(DEEPSEEK_V3, ranks=4, of=8)
    tables = [even_experts(config, 32, rank=rank, num_ranks=4) for rank in range(4)]
    counts = torch.bincount(torch.cat(tables).flatten(), minlength=config.n_routed_experts)
    assert counts.min() == counts.max() == 4 * 32 * 8 // config.n_routed_experts


def test_tables_come_call_by_call_and_change_in_place() -> None:
    drawn = draw_uniform(TINY, num_steps=2, num_calls=3, num_tokens=20, generator=seeded(1))
    tables = RoutingTables(drawn)
    first = [tables.take(20) for _ in range(3)]
    assert torch.equal(torch.stack(first), drawn[0])
    for step in (1, 0, 1):
        tables.begin_step()
        assert torch.equal(torch.stack(first), drawn[step]), "a captured step reads the same memory"
        taken = [tables.take(7) for _ in range(3)]
        assert torch.equal(torch.stack(taken), drawn[step, :, :7])
    tables.begin_step()
    tables.take(5)
    tables.begin_step()
    assert torch.equal(tables.take(20), drawn[1, 0]), "a step begins with its first call"
    with pytest.raises(AssertionError):
        tables.take(21)


def test_only_the_choice_is_replaced() -> None:
    kernels = portable_kernels()
    routing = TableRouting(kernels)
    assert routing.kernels.name == kernels.name
    logits, bias = torch.randn(10, TINY.n_routed_experts), torch.zeros(TINY.n_routed_experts)
    rule = RoutingRule.of(TINY)
    chosen, expected = kernels.ops[GROUP_LIMITED_TOPK](logits, bias, rule)
    own, weights = routing.kernels.ops[GROUP_LIMITED_TOPK](logits, bias, rule)
    assert torch.equal(own, chosen)
    table = even_experts(TINY, 16)
    routing.tables = RoutingTables(table[None, None])
    ids, weights = routing.kernels.ops[GROUP_LIMITED_TOPK](logits, bias, rule)
    assert torch.equal(ids, table[:10])
    assert torch.equal(weights, expected)


@pytest.mark.parametrize("knows", [True, False])
def test_padding_goes_to_no_expert(knows: bool) -> None:
    logits, bias = torch.randn(10, TINY.n_routed_experts), torch.zeros(TINY.n_routed_experts)
    routing, table = TableRouting(portable_kernels()), even_experts(TINY, 16)
    routing.tables = RoutingTables(table[None, None].clone(), num_rows=6 if knows else None)
    rule, num_rows = RoutingRule.of(TINY), torch.tensor([6])
    ids, _ = routing.kernels.ops[GROUP_LIMITED_TOPK](logits, bias, rule, num_rows)
    assert torch.equal(ids[:6], table[:6])
    assert ids[6:].eq(-1).all()


@given(st.integers(1, 2**20), st.integers(1, 200))
def test_draws_fit_into_their_room(num_tokens: int, num_calls: int) -> None:
    steps = num_draws(DEEPSEEK_V3, num_tokens, num_calls)
    assert 2 <= steps <= MAX_STEPS
    assert steps == 2 or steps * num_calls * num_tokens * 64 <= MAX_BYTES
