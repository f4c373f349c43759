"""Padding in a step of fixed shape chooses no expert, in the kernel that chooses."""

import importlib
from typing import Any

import pytest
import torch

from engine.ops.gate import GROUP_LIMITED_TOPK
from engine.ops.routing_rule import RoutingRule
from tests.engine.triton_device import DEVICE, IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

RULE = RoutingRule(top_k=8, n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5)
NUM_TOKENS, NUM_EXPERTS = 13, 256


def routing() -> Any:
    return importlib.import_module("engine.ops.gate_kernel")


@pytest.mark.parametrize("num_rows", [-4, 0, 1, 7, 13, 20])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_rows_beyond_those_of_requests_choose_nothing(num_rows: int, num_parts: int) -> None:
    module = routing()
    generator = torch.Generator().manual_seed(num_rows + 100)
    parts = torch.randn(num_parts, NUM_TOKENS, NUM_EXPERTS, generator=generator).to(DEVICE)
    bias = (0.1 * torch.randn(NUM_EXPERTS, generator=generator)).to(DEVICE)
    count = torch.tensor([num_rows], device=DEVICE)
    ids, weights = module.group_limited_topk(parts, bias, RULE, count)
    plain_ids, plain_weights = module.group_limited_topk(parts, bias, RULE)
    real = max(num_rows, 0)
    assert ids[:real].equal(plain_ids[:real])
    assert ids[real:].eq(-1).all()
    assert weights.equal(plain_weights)
    expected, _ = GROUP_LIMITED_TOPK.reference(parts.sum(0), bias, RULE, count)
    assert ids.sort().values.equal(expected.sort().values)
    told_ids, told_weights = module.group_limited_topk(parts, bias, RULE, max(num_rows, 0))
    assert told_ids.equal(ids), "the same where the host knows the number"
    assert told_weights.equal(weights)


def test_what_a_step_holds_may_change_between_two_replays() -> None:
    """The number is read on the device: a graph that was captured once runs any batch."""
    module = routing()
    if IS_INTERPRETED:
        pytest.skip("graphs need a GPU")
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, device=DEVICE)
    bias = torch.zeros(NUM_EXPERTS, device=DEVICE)
    count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    module.group_limited_topk(logits, bias, RULE, count)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, _ = module.group_limited_topk(logits, bias, RULE, count)
    expected, _ = module.group_limited_topk(logits, bias, RULE)
    for num_rows in (3, 0, 13, 1):
        count.fill_(num_rows)
        graph.replay()
        assert ids[:num_rows].equal(expected[:num_rows])
        assert ids[num_rows:].eq(-1).all()
