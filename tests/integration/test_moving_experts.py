"""Workers whose experts move while they decode give the tokens of one process; metrics say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from tests.integration.client import run_all
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR
from tests.integration.test_tokens import SEEDED, assert_same, expected_tokens, requests_for
from tests.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
MOVING = DecodeSection(
    dp=2,
    num_blocks=128,
    num_redundant_experts=2,
    rebalance_experts="on",
    rebalance_interval_steps=8,
    rebalance_objective="rows",
    rebalance_min_gain=0.0,
)
DECODES = {
    "plain": MOVING,
    "from-host-memory": replace(MOVING, rebalance_host_gib=0.5),
    "ahead-with-drafts": DecodeSection(
        dp=2,
        num_blocks=128,
        overlap_steps="on",
        num_speculative_tokens=1,
        rebalance_experts="on",
        rebalance_interval_steps=8,
        rebalance_objective="rows",
        rebalance_min_gain=0.0,
    ),
}
MOVING_PREFILL = PrefillSection(
    num_blocks=128,
    max_num_batched_tokens=32,  # many steps a prompt, so that much moves in the middle of one
    enable_prefix_caching=False,
    num_redundant_experts=2,
    rebalance_experts="on",
    rebalance_interval_steps=2,
    rebalance_objective="rows",
    rebalance_min_gain=0.0,
)
PREFILLS = {"tp2": replace(MOVING_PREFILL, tp=2), "dp2": replace(MOVING_PREFILL, dp=2)}
LEAST_FLIPS, MOST_TURNS = 20, 60


@pytest.mark.parametrize("name", DECODES)
def test_tokens_stay_while_experts_move(
    name: str, oracle: DeepseekV3ForCausalLM, prompts: list[list[int]], tmp_path: Path
) -> None:
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        prefill=PrefillSection(num_blocks=128, max_num_batched_tokens=128),
        decode=DECODES[name],
    )
    expected = expected_tokens(oracle, prompts, SEEDED, 48)
    params = requests_for(prompts, SEEDED, 48)
    with Cluster(config, tmp_path) as cluster:
        for _ in range(4):
            assert_same(run_all(cluster.base_url, prompts, params), expected)
        cluster.wait_idle()
        # Ranks without work meet all the same, so a plan is carried out to its end.
        wait_until(lambda: len(set(_epochs(cluster) + _epochs(cluster))) == 1, "both ranks at rest")
        assert _epochs(cluster)[0] > 0
        for counter, least in (("plans", 2), ("rounds", 2), ("moves", 2), ("bytes", 1)):
            metric = f"pd_expert_rebalance_{counter}_total"
            assert cluster.metric("decode-0", metric) >= least, metric
        assert cluster.metric("decode-0", "pd_expert_rebalance_retreats_total") == 0
        from_host = cluster.metric("decode-0", "pd_expert_rebalance_host_moves_total")
        assert bool(from_host) == bool(config.decode.rebalance_host_gib)
    assert cluster.marked_processes() == []


@pytest.mark.parametrize("name", PREFILLS)
def test_tokens_stay_while_experts_of_prefill_move(
    name: str, oracle: DeepseekV3ForCausalLM, prompts: list[list[int]], tmp_path: Path
) -> None:
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        prefill=PREFILLS[name],
        decode=DecodeSection(num_blocks=128),
    )
    # One half of them, then the other: popular experts change, and plans go on.
    halves = (prompts[:9], prompts[9:])
    params = [requests_for(half, SEEDED, 4) for half in halves]
    expected = [expected_tokens(oracle, half, SEEDED, 4) for half in halves]
    with Cluster(config, tmp_path) as cluster:
        for turn in range(MOST_TURNS):
            half = turn % 2
            assert_same(run_all(cluster.base_url, halves[half], params[half]), expected[half])
            if _total(cluster, "rounds") >= LEAST_FLIPS and turn:
                break
        cluster.wait_idle()
        assert _total(cluster, "rounds") >= LEAST_FLIPS
        assert _total(cluster, "moves") >= LEAST_FLIPS
        assert _total(cluster, "bytes") > 0
    assert cluster.marked_processes() == []


def test_a_plan_that_does_not_pay_by_time_moves_nothing_and_is_told_of(
    oracle: DeepseekV3ForCausalLM, prompts: list[list[int]], tmp_path: Path
) -> None:
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        prefill=PrefillSection(num_blocks=128, max_num_batched_tokens=128),
        decode=replace(MOVING, rebalance_objective="time", rebalance_min_gain=1000.0),
    )
    expected = expected_tokens(oracle, prompts, SEEDED, 48)
    with Cluster(config, tmp_path) as cluster:
        assert_same(run_all(cluster.base_url, prompts, requests_for(prompts, SEEDED, 48)), expected)
        told = "pd_expert_rebalance_refused_total"
        wait_until(lambda: cluster.metric("decode-0", told, rank=0) >= 1, "a refused plan")
        assert cluster.metric("decode-0", "pd_expert_rebalance_expected_gain", rank=0) >= 0
        assert _epochs(cluster) == [0, 0]


def _epochs(cluster: Cluster) -> list[float]:
    return [cluster.metric("decode-0", "pd_expert_placement_epoch", rank=rank) for rank in (0, 1)]


def _total(cluster: Cluster, counter: str) -> float:
    """Of prefill's rank 0, which counts every flip of all."""
    return cluster.metric("prefill-0", f"pd_expert_rebalance_{counter}_total", rank=0)
