"""A decode rank's memory: the published figures come out, a real model agrees, refusals help."""

import dataclasses
from typing import Any

import pytest
import torch

from bench.shapes import DEEPSEEK_V3
from deploy.checks.decode_budget import (
    DecodePlan,
    check_placement,
    divide_memory,
    weights_per_rank,
)
from engine.boot.build import build_model
from engine.config import DeepseekV3Config
from engine.kernels.portable import portable_kernels
from runtime.errors import ConfigError
from tests.engine.tiny import tiny_config


@pytest.mark.parametrize(
    ("ranks", "redundant", "slots", "gigabytes"),
    [(8, 0, 32, 101.9), (16, 0, 16, 61.0), (72, 32, 4, 30.3)],
)
def test_deepseek_v3(ranks: int, redundant: int, slots: int, gigabytes: float) -> None:
    plan = DecodePlan(num_ranks=ranks, num_redundant_experts=redundant)
    assert check_placement(DEEPSEEK_V3, plan).num_local_experts == slots
    weights = weights_per_rank(DEEPSEEK_V3, num_local_experts=slots)
    assert weights.least / 1e9 == pytest.approx(gigabytes, rel=0.01)
    budget = divide_memory(DEEPSEEK_V3, plan)
    assert budget.num_local_experts == slots
    beside_kv = budget.weights + budget.transfer_buffer + budget.workspace
    beside_kv += budget.graphs + budget.context
    block = 61 * 64 * 1152
    assert 0 <= budget.device - (beside_kv + budget.kv) < block
    assert (budget.num_blocks - 1) * 64 >= 4096 * plan.max_num_seqs


@pytest.mark.parametrize("with_mtp", [False, True])
@pytest.mark.parametrize("q_lora_rank", [128, None])
def test_a_built_model_agrees(with_mtp: bool, q_lora_rank: int | None) -> None:
    fields = tiny_config(
        hidden_size=256,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=128,
        v_head_dim=32,
        intermediate_size=384,
        moe_intermediate_size=128,
        vocab_size=512,
        num_nextn_predict_layers=1,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    config = DeepseekV3Config.from_hf(fields)
    model = build_model(
        config,
        dtype=torch.bfloat16,
        load_format="dummy",
        with_mtp=with_mtp,
        kernels=portable_kernels(has_fp8=True),
    )
    held = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    weights = weights_per_rank(config, num_local_experts=config.n_routed_experts, with_mtp=with_mtp)
    assert held == weights.total - weights.up_projection


def plan(**changes: Any) -> DecodePlan:
    return dataclasses.replace(DecodePlan(num_ranks=8), **changes)


@pytest.mark.parametrize(
    ("changes", "field", "fix"),
    [
        ({"num_ranks": 72}, "num_redundant_experts", "32"),
        ({"num_ranks": 72, "num_redundant_experts": -8}, "num_redundant_experts", "0 or more"),
        ({"num_ranks": 4}, "dp", "8 or more ranks"),
        ({"num_redundant_experts": 256}, "num_redundant_experts", "112 or less"),
        ({"max_num_seqs": 129}, "max_num_seqs", "128, or a larger max_tokens_per_rank"),
        ({"max_num_seqs": 96, "num_speculative_tokens": 1}, "max_num_seqs", "64, or"),
        ({"max_num_seqs": 64, "max_tokens_per_rank": 100}, "max_tokens_per_rank", "112"),
        ({"num_ranks": 16, "by_nvlink": True}, "ep", "another dispatcher"),
    ],
)
def test_refusals(changes: dict[str, int], field: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        divide_memory(DEEPSEEK_V3, plan(**changes))
    assert caught.value.path == field
    assert fix in caught.value.fix


def test_the_exchange_over_nvlink_needs_less_memory() -> None:
    budgets = [divide_memory(DEEPSEEK_V3, plan(by_nvlink=is_so)) for is_so in (False, True)]
    low_latency, nvlink = (budget.transfer_buffer for budget in budgets)
    assert nvlink < low_latency / 10
    assert budgets[1].num_blocks > budgets[0].num_blocks


def test_following_the_fix_helps() -> None:
    asked = plan(max_num_seqs=256, num_speculative_tokens=1)
    with pytest.raises(ConfigError) as caught:
        divide_memory(DEEPSEEK_V3, asked)
    fewer = int(caught.value.fix.split(",")[0])
    divide_memory(DEEPSEEK_V3, dataclasses.replace(asked, max_num_seqs=fewer))
    with pytest.raises(ConfigError):
        divide_memory(DEEPSEEK_V3, dataclasses.replace(asked, max_num_seqs=fewer + 1))


def test_the_number_of_redundant_experts_that_is_named_fits_and_no_more_do() -> None:
    asked = plan(num_redundant_experts=256)
    with pytest.raises(ConfigError) as caught:
        divide_memory(DEEPSEEK_V3, asked)
    fits = int(caught.value.fix.split()[0])
    assert divide_memory(DEEPSEEK_V3, plan(num_redundant_experts=fits)).num_blocks > 0
    with pytest.raises(ConfigError):
        divide_memory(DEEPSEEK_V3, plan(num_redundant_experts=fits + 8))


def test_the_number_of_ranks_that_is_named_fits_and_none_before_does() -> None:
    with pytest.raises(ConfigError) as caught:
        divide_memory(DEEPSEEK_V3, plan(num_ranks=2))
    ranks = int(caught.value.fix.split()[0])
    assert divide_memory(DEEPSEEK_V3, plan(num_ranks=ranks)).num_blocks > 0
    with pytest.raises(ConfigError):
        divide_memory(DEEPSEEK_V3, plan(num_ranks=ranks // 2))


def test_redundant_experts_and_those_on_the_move_take_of_the_kv() -> None:
    budgets = [
        divide_memory(DEEPSEEK_V3, plan(**changes))
        for changes in ({}, {"num_redundant_experts": 8}, {"moves_experts": True})
    ]
    still, redundant, moving = budgets
    expert = 44_040_192 + 10_752  # Weights, and a float32 for every block of them.
    assert redundant.weights - still.weights == DEEPSEEK_V3.num_moe_layers * expert
    assert moving.moving == 2 * (expert + 256)
    block_bytes = still.kv // still.num_blocks  # KV is whole blocks.
    assert abs(still.kv - moving.kv - moving.moving) < block_bytes
    assert redundant.num_blocks < moving.num_blocks <= still.num_blocks


def test_a_byte_instead_of_two_per_number_holds_twice_as_many_blocks() -> None:
    wide, narrow = (
        divide_memory(DEEPSEEK_V3, plan(latent_bytes=size)).num_blocks for size in (1152, 576)
    )
    assert narrow == pytest.approx(2 * wide, abs=1)
