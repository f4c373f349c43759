"""The kernel that chooses experts counts them as the reference does, and chooses as without."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops.gate import GROUP_LIMITED_TOPK
from engine.ops.routing_rule import RoutingRule
from tests.engine.triton_device import DEVICE, IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

RULE = RoutingRule(top_k=8, n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5)
NUM_EXPERTS = 256


def choose(*args: Any) -> tuple[Tensor, Tensor]:
    module: Any = importlib.import_module("engine.ops.gate_kernel")
    ids, weights = module.group_limited_topk(*args)
    return ids, weights


def draw(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, NUM_EXPERTS, generator=generator)
    # Skewed: several tokens of a step add to one bin at the same time.
    logits[:, :20] += 3.0
    return logits.to(DEVICE), (0.1 * torch.randn(NUM_EXPERTS, generator=generator)).to(DEVICE)


@pytest.mark.parametrize("num_rows", [None, 0, 5, 13, 40])
@pytest.mark.parametrize("num_tokens", [1, 13])
def test_counts_are_those_of_the_reference(num_tokens: int, num_rows: int | None) -> None:
    logits, bias = draw(num_tokens, seed=num_tokens)
    count = None if num_rows is None else torch.tensor([num_rows], device=DEVICE)
    plain_ids, plain_weights = choose(logits, bias, RULE, count)
    before = torch.arange(NUM_EXPERTS + 1, dtype=torch.int64, device=DEVICE)
    load, expected = before.clone(), before.clone()
    for _ in range(2):
        ids, weights = choose(logits, bias, RULE, count, load)
        GROUP_LIMITED_TOPK.reference(logits, bias, RULE, count, expected)
        assert ids.equal(plain_ids)
        assert weights.equal(plain_weights)
    assert load[:-1].equal(expected[:-1])
    if num_rows is not None:  # the same where the host knows the number
        choose(logits, bias, RULE, num_rows, load)
        choose(logits, bias, RULE, num_rows, load)
        assert (load - before)[:-1].equal(2 * (expected - before)[:-1])
        load = expected
    real = num_tokens if num_rows is None else min(num_tokens, num_rows)
    assert (load - before)[:-1].sum() == 2 * real * RULE.top_k


def test_a_replayed_graph_counts_what_it_runs() -> None:
    if IS_INTERPRETED:
        pytest.skip("graphs need a GPU")
    num_tokens = 128
    logits, bias = draw(num_tokens)
    count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    load = torch.zeros(NUM_EXPERTS + 1, dtype=torch.int64, device=DEVICE)
    choose(logits, bias, RULE, count, load)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose(logits, bias, RULE, count, load)
    expected = torch.zeros_like(load)
    for seed, num_rows in enumerate((3, 0, 128, 77)):
        drawn, _ = draw(num_tokens, seed=seed)
        logits.copy_(drawn)
        count.fill_(num_rows)
        graph.replay()
        GROUP_LIMITED_TOPK.reference(drawn, bias, RULE, count, expected)
    assert load[:-1].equal(expected[:-1])
    assert load[:-1].sum() == (3 + 128 + 77) * RULE.top_k
