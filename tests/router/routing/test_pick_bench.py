"""The benchmark of picks runs and measures what it says."""

from __future__ import annotations

from bench.router.pick import Costs, measure


def test_the_benchmark_measures_each_cost() -> None:
    costs = measure(num_prefills=2, num_decodes=16, repeats=5)
    assert all(getattr(costs, name) > 0 for name in Costs.__slots__)
