"""Even routing obeys the rule of the model, and is even."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deploy.engine_bench.routing import EvenRouting, even_experts
from engine.config import ModelConfig
from engine.kernels.portable import PortableKernels
from engine.kernels.routing import RoutingRule
from engine.shapes import DEEPSEEK_V3, TINY, expert_shard, tensor_shard

SHARDS = [
    shard(DEEPSEEK_V3, ranks=ranks, of=8)
    for shard in (tensor_shard, expert_shard)
    for ranks in (1, 2, 4, 8)
]


@pytest.mark.parametrize("config", SHARDS)
def test_every_expert_gets_as_many_rows(config: ModelConfig) -> None:
    ids = even_experts(config, 1024)
    counts = torch.bincount(ids.flatten(), minlength=config.n_routed_experts)
    assert counts.min() == counts.max() == 1024 * ids.shape[1] // config.n_routed_experts
    assert counts.shape == (config.n_routed_experts,)
    leading = torch.bincount(ids[: 2 * config.n_routed_experts].flatten())
    assert leading.min() == leading.max()


@given(
    n_group=st.sampled_from((1, 2, 4, 8)),
    size=st.integers(2, 12),
    data=st.data(),
    num_tokens=st.integers(1, 200),
)
def test_experts_of_a_token_differ_and_lie_in_few_groups(
    n_group: int, size: int, data: st.DataObject, num_tokens: int
) -> None:
    topk_group = data.draw(st.integers(1, n_group))
    top_k = data.draw(st.integers(1, topk_group * size))
    config = replace(
        TINY,
        n_routed_experts=n_group * size,
        n_group=n_group,
        topk_group=topk_group,
        num_experts_per_tok=top_k,
    )
    ids = even_experts(config, num_tokens)
    for row in ids.tolist():
        assert len(set(row)) == top_k
        assert len({expert // size for expert in row}) <= topk_group


def test_few_tokens_a_rank_reach_every_expert_evenly() -> None:
    config = expert_shard(DEEPSEEK_V3, ranks=4, of=8)
    tables = [even_experts(config, 32, rank=rank, num_ranks=4) for rank in range(4)]
    counts = torch.bincount(torch.cat(tables).flatten(), minlength=config.n_routed_experts)
    assert counts.min() == counts.max() == 4 * 32 * 8 // config.n_routed_experts


def test_only_the_choice_is_replaced() -> None:
    kernels = PortableKernels()
    table = even_experts(TINY, 16)
    routing = EvenRouting(kernels, table)
    assert routing.name == kernels.name
    logits, bias = torch.randn(10, TINY.n_routed_experts), torch.zeros(TINY.n_routed_experts)
    rule = RoutingRule.of(TINY)
    ids, weights = routing.group_limited_topk(logits, bias, rule)
    assert torch.equal(ids, table[:10])
    assert torch.equal(weights, kernels.group_limited_topk(logits, bias, rule)[1])
