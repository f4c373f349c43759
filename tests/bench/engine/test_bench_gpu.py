"""On one GPU: ends of steps by events, draws that a captured step reads, and a whole row."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine.routing import RoutingTables, draw_uniform
from bench.engine.timing import StepClock
from bench.shapes import DEEPSEEK_V3, expert_shard
from deploy.cli import main
from engine.device_span import DeviceSpan
from experts.data_sheets import find_sheet
from tests.bench.engine.test_routing import assert_obeys, off_by

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

GPU = torch.device("cuda", 0)
FAR = 7.0


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def test_ends_of_steps_are_the_devices_however_late_the_host_reads() -> None:
    numbers = torch.randn(2048, 2048, device=GPU)
    clock, spans = StepClock(), []
    for repeats in (1, 40, 10, 80):
        span = DeviceSpan.start(GPU)
        assert span is not None
        for _ in range(repeats):
            numbers = torch.nn.functional.normalize(numbers @ numbers)
        span.end()
        clock.launched(span)
        spans.append(span)
    torch.cuda.synchronize()
    time.sleep(0.2)
    ends = [clock.take() for _ in spans]
    for index in range(1, len(spans)):
        distance = spans[index].ended_after(spans[index - 1])
        assert distance > 0.0
        assert ends[index] - ends[index - 1] == pytest.approx(distance)
        assert distance >= spans[index].gap_after(spans[index - 1])
    assert ends[-1] == pytest.approx(spans[-1].ended_after(spans[0]), rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("config", [DEEPSEEK_V3, expert_shard(DEEPSEEK_V3, ranks=4, of=8)])
def test_draws_on_a_gpu_obey_the_rule_and_are_uniform(config: Any) -> None:
    generator = torch.Generator(device=GPU).manual_seed(11)
    drawn = draw_uniform(config, num_steps=2, num_calls=3, num_tokens=4096, generator=generator)
    assert drawn.device == GPU
    for call in drawn.flatten(0, 1).cpu():
        assert_obeys(call[:64], config)
        counts = torch.bincount(call.flatten(), minlength=config.n_routed_experts)
        share = config.num_experts_per_tok / config.n_routed_experts
        assert off_by(counts, 4096, share) < FAR


def test_a_captured_step_reads_the_tables_of_each_step() -> None:
    generator = torch.Generator(device=GPU).manual_seed(5)
    drawn = draw_uniform(DEEPSEEK_V3, num_steps=3, num_calls=2, num_tokens=64, generator=generator)
    tables = RoutingTables(drawn)
    out = torch.zeros(2, 57, 8, dtype=torch.int64, device=GPU)

    def step() -> None:
        for call in out:
            call.copy_(tables.take(57))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in (1, 2, 0, 1):
        tables.begin_step()
        graph.replay()
        assert torch.equal(out, drawn[number, :, :57])


def measure(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    sizes = ["--layers", "2", "--shard-of", "8", "--seconds", "2", "--warm-up", "0.5"]
    assert main(["bench", *arguments, *sizes, "--json", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


def assert_is_told(report: dict[str, Any], times: str) -> None:
    method, quantiles = report["method"], report[times]
    assert method["step_ends"] == "events of the device"
    assert method["seconds"] >= 2.0
    assert quantiles["count"] == method["num_steps"]
    assert 0 < quantiles["p10"] <= quantiles["p50"] <= quantiles["p90"]
    mean_ms = 1e3 * method["seconds"] / method["num_steps"]
    assert quantiles["p10"] <= mean_ms
    for end in ("begin", "end"):
        seen = report["clocks"][end]
        if shutil.which("nvidia-smi") is None:
            assert seen == {"gpus": None, "why": "nvidia-smi is not installed"}
            continue
        (gpu,) = seen["gpus"]
        assert gpu["sm_mhz"] > 0
        assert gpu["power_w"] > 0
    shares = report["rates"]["as_run"]["share_of_bound"]
    sheet = find_sheet(torch.cuda.get_device_name())
    if sheet is None:
        assert shares is None
    else:
        assert 0 < shares["data_sheet"] < 1, "nothing passes the data sheet"


def test_a_row_of_decode(tmp_path: Path) -> None:
    report = measure(
        tmp_path, "decode", "--batch", "57", "--context-lens", "200-2000", "--temperature", "0.8",
        "--top-p", "0.95",
    )  # fmt: skip
    assert_is_told(report, "step_ms")
    assert report["execution"]["dispatcher"] == "LoopbackMaskedDispatcher"
    assert report["execution"]["dependent_launches"] is True
    assert report["execution"]["side_stream"] is True
    assert report["method"]["max_ahead"] == 1
    assert 200 <= report["mean_context"] < 2128
    assert report["idle_between_steps_ms"]["p50"] >= 0
    assert report["layers_us"]["us_per_layer"] > 0
    stages = {row["stage"] for row in report["profile"]["stages"]}
    assert any("mlp" in stage for stage in stages)


def test_a_row_of_prefill(tmp_path: Path) -> None:
    report = measure(
        tmp_path, "prefill", "--prompt-len", "1024", "--batch-tokens", "4096", "--shard-axis", "dp"
    )
    assert_is_told(report, "batch_ms")
    assert report["ttft_ms"]["p50"] > 0
    assert report["execution"]["two_batch_overlap"] is False
