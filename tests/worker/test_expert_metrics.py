"""Scrapes tell how even the latest steps were, by where experts stand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
