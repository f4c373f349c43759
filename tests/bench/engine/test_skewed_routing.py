"""A synthetic skew has likelier experts, other ones in each layer; what runs is what is counted."""

import pytest
import torch
from torch import Tensor

from bench.engine.routing import (
    LayerTables,
    TableRouting,
    draw_skewed,
    skewed_experts,
    uniform_experts,
)
from bench.experts.skew import log_likelihoods
from bench.shapes import DEEPSEEK_V3, TINY, expert_shard
from engine.kernels.portable import portable_kernels
from engine.ops.gate import GROUP_LIMITED_TOPK
from engine.ops.routing_rule import RoutingRule

NUM_EXPERTS = TINY.n_routed_experts


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def counts_of(ids: Tensor, num_experts: int = NUM_EXPERTS) -> Tensor:
    return torch.bincount(ids.flatten(), minlength=num_experts)


def test_experts_of_a_token_differ_and_lie_in_few_groups() -> None:
    log_E = torch.from_numpy(log_likelihoods(1, NUM_EXPERTS, seed=3)[0])
    ids = skewed_experts(TINY, 500, log_E, seeded(1))
    size = NUM_EXPERTS // TINY.n_group
    for row in ids.tolist():
        assert len(set(row)) == TINY.num_experts_per_tok
        assert len({expert // size for expert in row}) <= TINY.topk_group


def test_likelier_experts_come_oftener() -> None:
    config = expert_shard(DEEPSEEK_V3, ranks=4, of=8)
    log_E = torch.from_numpy(log_likelihoods(1, config.n_routed_experts, seed=3)[0])
    counts = counts_of(skewed_experts(config, 4000, log_E, seeded(1)), config.n_routed_experts)
    uniform = counts_of(uniform_experts(config, 4000, seeded(1)), config.n_routed_experts)
    assert counts.max() > 3 * uniform.max()
    ranked = counts[log_E.argsort()].double()
    assert ranked[-16:].mean() > 4 * ranked[:16].mean()


def test_ranks_draw_apart_from_the_same_skew() -> None:
    log_LE = torch.from_numpy(log_likelihoods(2, NUM_EXPERTS, seed=0))
    one, other = (
        draw_skewed(TINY, log_LE, num_steps=2, num_tokens=3000, generator=seeded(rank))
        for rank in (1, 2)
    )
    assert one.shape == (2, 2, 3000, TINY.num_experts_per_tok)
    assert not torch.equal(one, other)
    shares = [counts_of(drawn[:, 0]).double() / drawn[:, 0].numel() for drawn in (one, other)]
    assert float((shares[0] - shares[1]).abs().max()) < 0.01
    layers = [counts_of(one[:, layer]).double() / one[:, layer].numel() for layer in (0, 1)]
    assert float((layers[0] - layers[1]).abs().max()) > 0.02, "layers are skewed differently"


def tables_of_two_layers(num_rows: int | None = None) -> tuple[LayerTables, list[Tensor], Tensor]:
    biases = [torch.zeros(NUM_EXPERTS) for _ in range(2)]
    log_LE = torch.from_numpy(log_likelihoods(2, NUM_EXPERTS, seed=0))
    drawn = draw_skewed(TINY, log_LE, num_steps=2, num_tokens=12, generator=seeded(7))
    layer_of = {bias.data_ptr(): layer for layer, bias in enumerate(biases)}
    return LayerTables(drawn.clone(), layer_of, num_rows=num_rows), biases, drawn


@pytest.mark.parametrize("num_rows", [None, 12])
def test_a_layer_is_known_by_its_gate_whatever_was_called_before(num_rows: int | None) -> None:
    tables, biases, drawn = tables_of_two_layers(num_rows)
    assert torch.equal(tables.take(5, biases[1]), drawn[0, 1, :5])
    tables.begin_step()
    assert torch.equal(tables.take(6, biases[1]), drawn[1, 1, :6])
    assert torch.equal(tables.take(6, biases[0]), drawn[1, 0, :6])
    assert torch.equal(tables.take(6, biases[1]), drawn[1, 1, 6:]), "the second micro-batch"
    assert torch.equal(tables.take(6, biases[1]), drawn[1, 1, :6])


def test_fixed_steps_take_the_same_rows_always() -> None:
    tables, biases, drawn = tables_of_two_layers(num_rows=3)
    for _ in range(2):
        taken = tables.take(6, biases[0])
        assert torch.equal(taken[:3], drawn[0, 0, :3])
        assert taken[3:].eq(-1).all()


@pytest.mark.parametrize("is_told", [True, False])
def test_what_is_counted(is_told: bool) -> None:
    tables, biases, drawn = tables_of_two_layers(num_rows=9)
    routing, logits = TableRouting(portable_kernels()), torch.randn(12, NUM_EXPERTS)
    routing.tables, routing.counts_tables = tables, is_told
    load = torch.zeros(NUM_EXPERTS + 1, dtype=torch.int64)
    num_rows, rule = torch.tensor([9]), RoutingRule.of(TINY)
    routing.kernels.ops[GROUP_LIMITED_TOPK](logits, biases[0], rule, num_rows, load)
    counted = counts_of(drawn[0, 0, :9])
    assert torch.equal(load[:-1], counted) is is_told
    assert int(load[:-1].sum()) == 9 * TINY.num_experts_per_tok
