"""Scrapes tell how even the latest steps were, where experts stand, and how even they could be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from engine.experts.placements import ExpertPlacements
from tests.worker.counted_rank import EXPERTS, Rank, make_experts
from worker.expert_load import METRIC_PASSES


def test_scrapes_tell_of_the_latest_window(tmp_path: Path) -> None:
    in_order = ExpertPlacements.alike(range(EXPERTS), EXPERTS, layers=range(1, 3))
    rank = Rank(replace(make_experts(tmp_path), placements=in_order, num_ranks=2))
    registry = CollectorRegistry()
    assert rank.feed is not None
    rank.feed.watch(registry)

    def told() -> tuple[float | None, float | None]:
        names = ("pd_expert_balancedness", "pd_expert_worst_layer_balancedness")
        overall, worst = (registry.get_sample_value(name) for name in names)
        return overall, worst

    assert told() == (1.0, 1.0)
    for _ in range(METRIC_PASSES):
        # Layer 1 is even; in layer 2 the first rank, of experts 0 to 3, gets three of four.
        rank.step({(1, 0): 2, (1, 7): 2, (2, 1): 3, (2, 6): 1})
    rank.feed.deliver()
    overall, worst = told()
    assert overall == pytest.approx((2 + 2) / (2 + 3))
    assert worst == pytest.approx(2 / 3)


def test_what_chance_alone_does_is_the_whole_floor_and_a_skew_is_not(tmp_path: Path) -> None:
    in_order = ExpertPlacements.alike(range(EXPERTS), EXPERTS, layers=range(1, 3))
    rank = Rank(replace(make_experts(tmp_path), placements=in_order, num_ranks=2))
    registry = CollectorRegistry()
    assert rank.feed is not None
    rank.feed.watch(registry)

    def told() -> tuple[float, float]:
        names = ("pd_expert_balancedness_of_floor", "pd_expert_worst_layer_balancedness_of_floor")
        overall, worst = (registry.get_sample_value(name) for name in names)
        assert overall is not None
        assert worst is not None
        return overall, worst

    assert told() == (1.0, 1.0)
    draws = np.random.default_rng(1)
    for _ in range(METRIC_PASSES):
        experts = draws.integers(0, EXPERTS, 2)
        rank.step({(layer, int(expert)): 1 for layer, expert in zip((1, 2), experts, strict=True)})
    rank.feed.deliver()
    by_chance = registry.get_sample_value("pd_expert_balancedness")
    overall, worst = told()
    assert by_chance is not None
    assert by_chance < overall
    assert overall == pytest.approx(1.0, abs=0.1)
    assert worst >= 0.9
    for _ in range(METRIC_PASSES):
        rank.step({(1, 0): 1, (2, 0): 1})
    rank.feed.deliver()
    overall, worst = told()
    assert overall < 0.65
    assert worst < 0.8
