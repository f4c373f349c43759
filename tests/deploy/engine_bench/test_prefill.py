"""`bench prefill` end to end on CPU ranks with a small model, as a person would run it."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from deploy.engine_bench.report import Quantiles

COMMAND = ["bench", "prefill", "--device", "cpu", "--model-shape", "tiny", "--prompt-len", "32"]


def measure(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    sizes = ["--batch-tokens", "64", "--repeats", "2", "--warm-ups", "1"]
    assert main([*COMMAND, *sizes, *arguments, "--json", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


@pytest.mark.slow
def test_two_ranks_that_share_heads(tmp_path: Path) -> None:
    table = tmp_path / "table.txt"
    report = measure(tmp_path, "--tp", "2", "--trace", str(table))
    assert report["label"] == "tiny on 2 CPU ranks"
    assert report["options"]["setup"]["ep"] == 2
    batch = report["batch_ms"]
    assert 0 < batch["p10"] <= batch["median"] <= batch["p90"]
    assert batch["count"] == 2
    as_run = report["rates"]["as_run"]
    assert as_run["tokens_per_s"] == pytest.approx(64 / batch["median"] * 1e3)
    assert as_run["share_of_bound"] is None, "no share of a GPU's bound on a CPU"
    assert report["ttft_ms"]["median"] > 0
    profile = report["profile"]
    stages = {row["stage"]: row for row in profile["stages"]}
    assert "varlen_attention" in stages
    assert {"ranks: start_all_gather", "ranks: start_reduce_scatter"} <= set(stages)
    assert stages["ranks: start_all_gather"]["kind"] == "traffic"
    assert profile["compute_ms"] <= profile["window_ms"]
    assert sum(row["calls"] for row in stages.values()) == profile["num_spans"]
    assert report["bubbles_ms"]["profiled"] == profile["idle_ms"]
    assert report["machine"]["versions"]["torch"]
    assert report["command"].startswith("python -m deploy")
    assert table.read_text(encoding="utf-8").startswith("tiny on 2 CPU ranks")


@pytest.mark.slow
def test_ranks_with_their_own_tokens_as_a_proxy(tmp_path: Path) -> None:
    report = measure(
        tmp_path, "--dp", "2", "--shard-of", "8", "--layers", "2", "--profile", "off",
        "--ttft", "off", "--routing", "model",
    )  # fmt: skip
    assert report["label"] == "per-rank proxy on 2 CPU ranks, 2 of 3 layers"
    assert report["profile"] is None
    assert report["ttft_ms"] is None
    assert report["rates"]["as_run"]["tokens"] == 128


def test_quantiles_lie_between_times() -> None:
    assert Quantiles.of([0.003, 0.001, 0.002]).median == pytest.approx(2.0)
    assert Quantiles.of([0.001]).p90 == pytest.approx(1.0)
    assert Quantiles.of([0.0, 0.010]).p10 == pytest.approx(1.0)
