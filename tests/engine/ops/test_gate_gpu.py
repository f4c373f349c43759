"""The choice of experts where logits tie, or are not numbers, and what placement makes of it.

On a GPU or in Triton's interpreter; see `test_fused_gpu` for how that is run.
"""

import importlib
import math
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
    # Of the interpreter: NaN is what these are about.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

ALL_GROUPS = RoutingRule(
    top_k=4, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5
)
SOME_GROUPS = RoutingRule(
    top_k=4, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5
)
V3 = RoutingRule(top_k=8, n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5)
RULES = [ALL_GROUPS, SOME_GROUPS]
NUM_EXPERTS = 16


def choose(logits: Tensor, bias: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    module: Any = importlib.import_module("engine.ops.gate_kernel")
    ids, weights = module.group_limited_topk(logits, bias, rule)
    return ids, weights


def exact_choice(logits: list[float], bias: list[float], rule: RoutingRule) -> list[int]:
    """Return the experts of one token, the lowest of equals first; in one group or in several."""
    choice = [1 / (1 + math.exp(-x)) + b for x, b in zip(logits, bias, strict=True)]
    size = len(choice) // rule.n_group
    groups = [choice[start : start + size] for start in range(0, len(choice), size)]
    worth = [sum(sorted(group)[-2:]) for group in groups]
    kept = sorted(range(rule.n_group), key=lambda group: (-worth[group], group))[: rule.topk_group]
    experts = [expert for expert in range(len(choice)) if expert // size in kept]
    return sorted(experts, key=lambda expert: (-choice[expert], expert))[: rule.top_k]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_ties_go_to_the_lowest(rule: RoutingRule, num_tokens: int) -> None:
    # Halves: scores of equal logits plus a bias of quarters tie within and between groups.
    logits = torch.randint(-1, 2, (num_tokens, NUM_EXPERTS), device=DEVICE).float() * 100
    logits[0] = 0.0
    bias = torch.randint(0, 2, (NUM_EXPERTS,), device=DEVICE).float() / 4
    ids, _ = choose(logits, bias, rule)
    expected = [exact_choice(row, bias.tolist(), rule) for row in logits.tolist()]
    assert ids.tolist() == expected


@pytest.mark.parametrize("rule", RULES)
def test_infinite_logits_are_numbers(rule: RoutingRule) -> None:
    logits = torch.randn(5, NUM_EXPERTS, device=DEVICE)
    logits[0], logits[1], logits[2, ::2], logits[3, ::3] = (
        -torch.inf,
        torch.inf,
        -torch.inf,
        torch.inf,
    )
    bias = torch.rand(NUM_EXPERTS, device=DEVICE)
    ids, weights = choose(logits, bias, rule)
    expected, expected_weights = GROUP_LIMITED_TOPK.reference(logits, bias, rule)
    order, expected_order = ids.argsort(dim=1), expected.argsort(dim=1)
    assert torch.equal(ids.gather(1, order), expected.gather(1, expected_order))
    torch.testing.assert_close(weights.gather(1, order), expected_weights.gather(1, expected_order))


def spoil(logits: Tensor) -> list[int]:
    """Put NaN into most rows in different ways; return the rows that have it."""
    logits[0] = torch.nan
    logits[1, 5] = torch.nan
    logits[2, NUM_EXPERTS // 2 :] = torch.nan
    logits[3] = torch.nan
    logits[3, 2], logits[3, 9] = torch.inf, -torch.inf
    logits[4, ::3] = torch.nan
    return [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spoils_bias", [False, True])
def test_rows_that_are_not_numbers_choose_experts_of_their_own(
    rule: RoutingRule, spoils_bias: bool
) -> None:
    logits = torch.randn(7, NUM_EXPERTS, device=DEVICE)
    bias = torch.rand(NUM_EXPERTS, device=DEVICE) * 0.1
    good_ids, good_weights = choose(logits, bias, rule)
    rows = spoil(logits)
    if spoils_bias:
        bias[3] = torch.nan
    ids, weights = choose(logits, bias, rule)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < NUM_EXPERTS
    assert [len(set(row)) for row in ids.tolist()] == [rule.top_k] * 7, "no expert twice"
    assert weights[rows].isnan().all(), "the weights say that they are no numbers"
    if not spoils_bias:
        assert torch.equal(ids[5:], good_ids[5:])
        assert torch.equal(weights[5:], good_weights[5:])


@pytest.mark.parametrize("kind", ["all", "one", "group"])
def test_many_rows_that_are_not_numbers_stay_within_the_room_of_an_expert(kind: str) -> None:
    """A step that has failed writes nothing into rows of others, or behind the last one."""
    num_experts, num_tokens, max_rows = 64, 24, 128
    logits = torch.randn(num_tokens, num_experts, device=DEVICE)
    spoilt = {"all": slice(None), "one": slice(63, 64), "group": slice(8, 16)}[kind]
    logits[1:, spoilt] = torch.nan
    ids, _ = choose(logits, torch.zeros(num_experts, device=DEVICE), V3)
    assert num_tokens * V3.top_k > max_rows, "all pairs together would not fit an expert"
    masked: Any = importlib.import_module("engine.ops.masked_kernel")
    places = masked.moe_align_masked(ids, 0, num_experts, max_rows)
    assert int(places.num_rows_L.max()) <= num_tokens
    rows = places.rows_TK.flatten().long()
    assert len(set(rows.tolist())) == num_tokens * V3.top_k, "a row for each pair"
    assert torch.equal(rows // max_rows, ids.flatten()), "in the room of its expert"


@pytest.mark.parametrize("first", [0, 3])
def test_pairs_beyond_the_room_of_an_expert_get_no_row(first: int) -> None:
    """Experts twice in a row break the seam's rule; others' memory stays whole."""
    ids = torch.full((100, 2), first, device=DEVICE)
    ids[::7, 1] = first + 1
    modules = (
        importlib.import_module(f"engine.ops.{name}") for name in ("masked_kernel", "masked")
    )
    actual, expected = (module.moe_align_masked(ids, first, 2, 128) for module in modules)
    assert torch.equal(actual.rows_TK, expected.rows_TK)
    assert actual.num_rows_L.tolist() == expected.num_rows_L.tolist() == [128, 15]
    rows = actual.rows_TK.flatten()
    assert int((rows == -1).sum()) == 200 - 128 - 15
    assert len(set(rows.tolist())) == 128 + 15 + 1
    assert int(rows.max()) == 128 + 14


@pytest.mark.skipif(IS_INTERPRETED, reason="slow in the interpreter")
def test_a_step_of_deepseek_v3_that_has_failed_has_distinct_experts() -> None:
    logits = torch.randn(128, 256, device=DEVICE)
    logits[torch.rand_like(logits) < 0.3] = torch.nan
    logits[::3] = torch.nan
    ids, _ = choose(logits, torch.zeros(256, device=DEVICE), V3)
    assert [len(set(row)) for row in ids.tolist()] == [8] * 128
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 256
