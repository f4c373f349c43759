"""The configuration says what plans are to better; metrics say what the latest one expects."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from engine.experts.counted import CountedExperts
from engine.experts.pass_clock import PassClock
from experts.windows import LoadWindow
from runtime.config import DecodeSection
from runtime.errors import ConfigError
from tests.worker.counted_rank import make_experts
from worker.expert_plans import ExpertPlans, equal_hosts, open_expert_plans


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> CountedExperts:
    """Of a model on a CPU, eight experts in nine slots."""
    return replace(make_experts(tmp_path_factory.mktemp("experts")), num_ranks=3)


def opened(experts: CountedExperts, **changes: Any) -> ExpertPlans:
    section = DecodeSection(dp=3, num_redundant_experts=1, **changes)
    return open_expert_plans(section, experts, PassClock(), role="decode")


def table_of(experts: CountedExperts) -> np.ndarray:
    return np.array(experts.placements.table)


def skewed(experts: CountedExperts) -> LoadWindow:
    """A token a pass: time is the weights of active experts, whoever's rows they are."""
    counts = np.zeros((experts.placements.num_layers, 8), np.int64)
    counts[:, table_of(experts)[0, :3]] = 90
    return LoadWindow(first_pass=0, end_pass=100, counts_LE=counts)


def test_rows_move_experts_where_time_refuses(experts: CountedExperts) -> None:
    load, table = skewed(experts), table_of(experts)
    by_rows = opened(experts, rebalance_objective="rows", rebalance_min_gain=0.01)
    by_time = opened(experts, rebalance_min_gain=1e6)
    with closing(by_rows), closing(by_time):
        assert by_rows.make(load, table)
        assert not by_time.make(load, table)
    assert by_rows.counts is None
    assert by_time.counts is not None
    assert by_time.counts.num_refused == 1


def test_metrics_tell_what_the_latest_plan_expects(experts: CountedExperts) -> None:
    registry, plans = CollectorRegistry(), opened(experts)
    plans.watch(registry)

    def told(name: str) -> float | None:
        return registry.get_sample_value(f"pd_expert_rebalance_{name}")

    names = ("refused_total", "expected_gain", "expected_bytes", "expected_rounds")
    assert [told(name) for name in names] == [0, 0, 0, 0]
    with closing(plans):
        plans.make(skewed(experts), table_of(experts))
    assert plans.counts is not None
    expected = plans.counts.expected
    assert expected is not None
    assert [told(name) for name in names] == [
        plans.counts.num_refused,
        expected.gain,
        expected.num_bytes,
        expected.num_rounds,
    ]
    rows = CollectorRegistry()
    opened(experts, rebalance_objective="rows").watch(rows)
    assert not list(rows.collect()), "rows expect no time"


def test_a_gpu_without_a_data_sheet_is_refused_for_time_only(
    experts: CountedExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a new GPU")
    maps = SimpleNamespace(device=torch.device("cuda", 0))
    on_gpu: Any = replace(experts, placements=SimpleNamespace(maps=maps))
    with pytest.raises(ConfigError, match="a new GPU") as caught:
        opened(on_gpu)
    assert caught.value.path == "decode.rebalance_objective"
    assert '"rows"' in caught.value.fix
    opened(on_gpu, rebalance_objective="rows")


@pytest.mark.parametrize("objective", ["", "tokens"])
def test_another_objective_is_refused(objective: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DecodeSection(rebalance_objective=objective)
    assert caught.value.path == "decode.rebalance_objective"
    assert "time" in caught.value.fix
    assert "rows" in caught.value.fix


@given(ranks=st.integers(1, 100), most=st.integers(1, 16))
def test_hosts_share_ranks_equally_and_hold_no_more_than_they_may(ranks: int, most: int) -> None:
    hosts = equal_hosts(ranks, most)
    assert ranks % hosts == 0
    assert ranks // hosts <= most
    assert all(ranks % fewer or ranks // fewer > most for fewer in range(1, hosts))
