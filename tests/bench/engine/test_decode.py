"""`bench decode` end to end on CPU ranks with a small model."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.engine import rank_model
from bench.engine.decode import step_sizes
from bench.shapes import TINY, with_layers
from deploy.checkpoint.model_folder import BUNDLED_MODEL
from deploy.cli import main
from engine.boot.build import build_kv_pool, build_model
from engine.boot.open_execution import OpenExecution, open_execution
from engine.graphs.buckets import batch_buckets
from engine.graphs.graph_runner import capture_steps
from engine.options import EngineOptions
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.config import DecodeSection
from worker.engine_options import engine_options

COMMAND = ["bench", "decode", "--device", "cpu", "--model-shape", "tiny", "--layers", "2"]


def measure(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    sizes = ["--context-lens", "40-70", "--output-len", "6", "--seconds", "0.1", "--warm-up", "0"]
    assert main([*COMMAND, *sizes, *arguments, "--json", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_one_rank_as_a_proxy(tmp_path: Path, overlap: str) -> None:
    report = measure(
        tmp_path, "--batch", "3", "--shard-of", "8", "--set", f"decode.overlap_steps={overlap}"
    )
    assert report["label"] == "per-rank proxy on 1 CPU rank, 2 of 3 layers, uniform routing"
    method, steps = report["method"], report["step_ms"]
    assert method["max_ahead"] == (overlap == "on")
    assert method["seconds"] >= 0.1
    assert method["num_steps"] == steps["count"] >= 2
    assert 0 < steps["p10"] <= steps["p50"] <= steps["p90"]
    assert (method["routing"], method["temperature"], method["top_p"]) == ("uniform", 1.0, 1.0)
    assert 40 <= report["mean_context"] < 76
    as_run, node = report["rates"]["as_run"], report["rates"]["node"]
    rate = 3 * method["num_steps"] / method["seconds"]
    assert as_run["tokens_per_s"] == pytest.approx(rate)
    assert as_run["share_of_bound"] is None, "no share of a GPU's bound on a CPU"
    assert node["tokens_per_s"] == pytest.approx(8 * rate * 2 / 3)
    assert report["bound"]["why"] == "no data sheet for CPU"
    assert report["clocks"]["begin"]["gpus"] is None
    assert "CPU" in report["clocks"]["end"]["why"]
    assert report["layers_us"] is None, "device time is a GPU's"
    assert report["execution"]["dispatcher"] == "LoopbackMaskedDispatcher"
    assert any("proxy: each rank holds" in note for note in report["notes"])
    assert any(row["stage"] == "gate_logits" for row in report["profile"]["stages"])


def test_what_runs_is_what_a_server_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[object, OpenExecution]] = []

    def spy(options: EngineOptions, *args: Any, **kwargs: Any) -> OpenExecution:
        opened.append((options, open_execution(options, *args, **kwargs)))
        return opened[-1][1]

    monkeypatch.setattr(rank_model, "open_execution", spy)
    report = measure(
        tmp_path, "--batch", "2", "--profile", "off", "--set", "decode.overlap_shared_expert=false",
        "--temperature", "0", "--routing", "even",
    )  # fmt: skip
    ((options, execution),) = opened
    section = DecodeSection(
        max_num_seqs=128,
        max_tokens_per_rank=128,
        overlap_shared_expert=False,
        num_speculative_tokens=0,
    )
    assert options == engine_options(section)
    assert execution.execution.overlap_shared_expert is False
    assert report["execution"]["overlap_shared_expert"] is False
    assert report["section"]["overlap_shared_expert"] is False
    assert "even routing, a bound" in report["label"]
    assert report["profile"] is None


@pytest.mark.nightly
def test_requests_bound_by_a_schema_each(tmp_path: Path) -> None:
    report = measure(tmp_path, "--batch", "3", "--profile", "off", "--grammar")
    grammar = report["grammar"]
    assert grammar["vocabulary"] == "the bundled model's, widened by pairs"
    assert 0 < grammar["bound_per_step"] <= 3
    assert grammar["failed"] == 0
    assert report["options"]["grammar"] is True
    assert any("a JSON schema of its own" in note for note in report["notes"])


@pytest.mark.nightly
def test_the_bundled_model_is_bound_over_its_own_vocabulary(tmp_path: Path) -> None:
    report = measure(
        tmp_path, "--batch", "2", "--profile", "off", "--grammar",
        "--model-shape", str(BUNDLED_MODEL), "--layers", "0",
    )  # fmt: skip
    assert report["grammar"]["vocabulary"] == "the model's"
    assert report["grammar"]["failed"] == 0


@pytest.mark.nightly
def test_without_schemas_none_is_told_of(tmp_path: Path) -> None:
    report = measure(tmp_path, "--batch", "2", "--profile", "off")
    assert report["grammar"] is None
    assert not any("schema" in note for note in report["notes"])


@pytest.mark.slow
def test_two_ranks_with_their_own_requests(tmp_path: Path) -> None:
    report = measure(
        tmp_path, "--dp", "2", "--batch", "3", "--temperature", "0.8", "--top-p", "0.95"
    )
    assert report["label"] == "tiny on 2 CPU ranks, 2 of 3 layers, uniform routing"
    assert report["tokens_per_step"] == 6
    assert [rank["requests"] for rank in report["ranks"]] == [3, 3]
    means = [rank["mean_context"] for rank in report["ranks"]]
    assert report["mean_context"] == pytest.approx(sum(means) / 2)
    assert means[0] != means[1], "ranks draw apart"
    kinds = {row["kind"] for row in report["profile"]["stages"]}
    assert kinds == {"compute", "traffic"}


@pytest.mark.nightly
def test_unequal_ranks(tmp_path: Path) -> None:
    report = measure(tmp_path, "--dp", "2", "--requests-per-rank", "3,0")
    assert report["tokens_per_step"] == 3
    assert [rank["requests"] for rank in report["ranks"]] == [3, 0]
    method = report["method"]
    rate = 3 * method["num_steps"] / method["seconds"]
    assert report["rates"]["as_run"]["tokens_per_s"] == pytest.approx(rate)
    assert report["mean_context"] == pytest.approx(report["ranks"][0]["mean_context"])
    assert "unequal ranks: 3, 0 requests" in report["notes"]


def test_lengths_beyond_the_worker_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "--context-lens", "900-999", "--max-model-len", "1000"]) == 2
    assert "context-lens = 1127" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("requests", "sizes"),
    [
        ((128,) * 4, (128,)),
        ((57,), (64,)),
        ((128, 0, 3, 0), (40, 128)),
        ((60, 5), (40, 64)),
        ((1, 0), (1,)),
    ],
)
def test_steps_have_the_sizes_that_a_worker_captures(
    requests: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    assert step_sizes(requests, 128) == sizes
    assert set(sizes) <= set(batch_buckets(128))


def test_only_the_sizes_that_come_are_captured() -> None:
    model = build_model(with_layers(TINY, 1), load_format="dummy")
    runner = ModelRunner(model, build_kv_pool(model, 4), Sampler(TINY.vocab_size))
    captured = capture_steps(
        runner, max_num_seqs=16, max_model_len=128, buckets=(2, 8), use_graphs=False
    )
    assert captured._graphs.buckets == (2, 8)
    assert captured._graphs.is_captured
    captured.close()


@pytest.mark.nightly
@pytest.mark.parametrize(("accept", "each"), [("1", 2.0), ("0", 1.0)])
def test_as_many_drafts_are_right_as_are_asked_for(
    tmp_path: Path, accept: str, each: float
) -> None:
    report = measure(tmp_path, "--batch", "3", "--drafts", "1", "--accept", accept)
    method, tokens = report["method"], report["tokens_per_request"]
    # The first step of a request has no drafts, and one that follows another in its place neither.
    assert 1.0 <= tokens <= each
    assert (tokens > 1.3) is (accept == "1")
    rate = 3 * tokens * method["num_steps"] / method["seconds"]
    assert report["rates"]["as_run"]["tokens_per_s"] == pytest.approx(rate)
    assert report["rates"]["as_run"]["share_of_bound"] is None
    assert any("1 drafts, forced" in note for note in report["notes"])


@pytest.mark.nightly
def test_a_budget_of_drafts_is_measured_as_in_a_worker(tmp_path: Path) -> None:
    """Each step has the number that is chosen before it; which, says the report."""
    report = measure(tmp_path, "--batch", "3", "--drafts", "auto", "--accept", "1")
    by_drafts = report["steps_by_drafts"]
    assert sum(by_drafts.values()) >= report["method"]["num_steps"]
    assert set(by_drafts) <= {"0", "1", "2", "3"}
    assert 1.0 <= report["tokens_per_request"] <= 4.0
    assert report["ranks"][0]["steps_by_drafts"] == by_drafts
    assert any("auto drafts, forced" in note for note in report["notes"])


@pytest.mark.nightly
def test_ranks_of_a_group_have_as_many_drafts_and_idle_ones_join(tmp_path: Path) -> None:
    report = measure(
        tmp_path, "--dp", "2", "--requests-per-rank", "3,0", "--drafts", "auto", "--accept", "1",
    )  # fmt: skip
    first, idle = report["ranks"]
    assert (first["requests"], idle["requests"]) == (3, 0)
    assert first["steps_by_drafts"] == idle["steps_by_drafts"]
    assert sum(first["steps_by_drafts"].values()) >= report["method"]["num_steps"]


def test_drafts_have_an_option_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--set", "decode.num_speculative_tokens=2"]) != 0
    assert "--drafts" in capsys.readouterr().err


def test_a_share_of_no_drafts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--batch", "3", "--accept", "0.5"]) != 0
    assert "accept = 0.5" in capsys.readouterr().err
