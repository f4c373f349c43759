"""`bench decode` end to end on CPU ranks with a small model."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from deploy.engine_bench.decode import decode_rates, describe_layers
from deploy.engine_bench.options import Axis, DecodeOptions, Setup
from deploy.engine_bench.shapes import choose_model

COMMAND = ["bench", "decode", "--device", "cpu", "--model-shape", "tiny", "--layers", "2"]


def measure(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    sizes = ["--batch", "3", "--context", "60-70", "--repeats", "2", "--warm-ups", "1"]
    assert main([*COMMAND, *sizes, *arguments, "--json", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_one_rank_as_a_proxy(tmp_path: Path, overlap: str) -> None:
    report = measure(tmp_path, "--shard-of", "8", "--overlap", overlap)
    assert report["label"] == "per-rank proxy on 1 CPU rank, 2 of 3 layers"
    assert report["step_ms"]["count"] == 2
    assert report["mean_context"] == 65 + 1
    as_run, node = report["rates"]["as_run"], report["rates"]["node"]
    assert as_run["tokens_per_s"] == pytest.approx(3 / report["step_ms"]["median"] * 1e3)
    assert node["tokens_per_s"] == pytest.approx(8 * as_run["tokens_per_s"] * 2 / 3)
    assert report["layers_us"] is None, "device time is a GPU's"
    assert any(row["stage"] == "gate_logits" for row in report["profile"]["stages"])


@pytest.mark.slow
def test_two_ranks_with_their_own_requests(tmp_path: Path) -> None:
    report = measure(tmp_path, "--dp", "2", "--graphs", "off")
    assert report["label"] == "tiny on 2 CPU ranks, 2 of 3 layers"
    assert report["rates"]["as_run"]["tokens"] == 6
    kinds = {row["kind"] for row in report["profile"]["stages"]}
    assert kinds == {"compute", "traffic"}


def test_shares_of_a_gpu_are_those_of_the_arithmetic() -> None:
    setup = Setup(dp=8, ep=8, shard_axis=Axis.DP)
    options = DecodeOptions(setup=setup, context=(4096, 4096))
    measured = choose_model(setup)
    rates = decode_rates(measured, options, 0.05)
    as_run = rates["as_run"]
    assert isinstance(as_run, dict)
    assert as_run["tokens_per_s"] == pytest.approx(8 * 128 / 0.05)
    assert as_run["share_of_bound"]["data_sheet"] == pytest.approx(20480 / 34300, rel=0.01)
    layers = describe_layers(measured, options, 0.05)
    assert layers is not None
    assert layers["us_per_layer"] == pytest.approx(50_000 / 61)
