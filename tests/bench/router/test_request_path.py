"""The router's benchmark runs and measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[3]


def run(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.router.request_path", "--streams", "3", "--tokens", "5"]
    result = subprocess.run(
        [*command, "--requests", "4", "--rounds", "2", "--step-ms", "1", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    measured: dict[str, Any] = json.loads(result.stdout)
    (streams,) = measured["streams"]
    assert streams["output_tokens"] == 15
    assert 0 < streams["events_per_token"] <= 1
    assert streams["tokens_per_core_s"] > 0
    assert streams["cpu_us_per_chunk"] > 0
    return measured


def test_the_benchmark_measures_a_real_router() -> None:
    measured = run()
    assert measured["added_ttft_p50_ms"] <= measured["added_ttft_p99_ms"]
    kinds = [requests["stream"] for requests in measured["short_requests"]]
    assert kinds == [False, True, True]
    for added in measured["added"]:
        legs = sum(leg["p50_ms"] for leg in added["legs"].values())
        assert 0 < added["in_router"]["p50_ms"] < legs
        assert 0 < added["outside_workers"]["p50_ms"] < added["first_bytes"]["p99_ms"]


def test_two_trees_are_asked_in_turns() -> None:
    command = [sys.executable, "-m", "bench.router.turns", str(ROOT), "--rounds", "2"]
    result = subprocess.run(
        [*command, "--requests", "16"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    costs = json.loads(result.stdout)["CPU, streamed"][str(ROOT)]
    assert 0 < costs["least_us"] <= costs["median_us"]


def test_another_router_is_measured_in_the_same_way() -> None:
    """A pipe to the decode worker stands for it."""
    pipe = f"{sys.executable} -m tests.bench.router.pipe {{port}} {{decode}}"
    measured = run("--command", pipe)
    assert measured["added"] == [], "its workers are others"
    assert [each["num_requests"] for each in measured["short_requests"]] == [16, 16, 16]
