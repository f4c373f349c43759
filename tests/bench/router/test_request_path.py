"""The router's benchmark runs and measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_benchmark_measures_a_real_router() -> None:
    command = [sys.executable, "-m", "bench.router.request_path", "--streams", "3", "--tokens", "5"]
    result = subprocess.run(
        [*command, "--requests", "4", "--step-ms", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    measured = json.loads(result.stdout)
    (streams,) = measured["streams"]
    assert streams["output_tokens"] == 15
    assert 0 < streams["events_per_token"] <= 1
    assert streams["tokens_per_core_s"] > 0
    assert measured["added_ttft_p50_ms"] <= measured["added_ttft_p99_ms"]
    assert [requests["stream"] for requests in measured["short_requests"]] == [False, True]
