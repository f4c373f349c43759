"""`bench prefill` end to end on CPU ranks with a small model, as a person would run it."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.engine.options import PrefillOptions, Setup
from bench.engine.prefill import rows_without_padding
from deploy.cli import main
from engine.prompt_drafts import PromptDrafts

COMMAND = ["bench", "prefill", "--device", "cpu", "--model-shape", "tiny", "--prompt-len", "32"]


def measure(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    sizes = ["--batch-tokens", "64", "--seconds", "0.1", "--warm-up", "0"]
    assert main([*COMMAND, *sizes, *arguments, "--json", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


@pytest.mark.parametrize(
    ("batch_tokens", "tp", "sizes", "expected"),
    [
        (64, 1, (64,), 64),
        (64, 4, (64,), 64),
        (64, 3, (64,), None),
        (40, 1, (64,), None),
        (256, 1, (64, 256), None),
        (64, 1, (), None),
    ],
)
def test_tables_know_of_padding_only_where_all_steps_have_none(
    batch_tokens: int, tp: int, sizes: tuple[int, ...], expected: int | None
) -> None:
    shortest = min(batch_tokens, 64)
    options = PrefillOptions(
        setup=Setup(tp=tp), batch_tokens=batch_tokens, prompt_len=shortest, ttft=True
    )
    assert rows_without_padding(options, sizes) == expected


@pytest.mark.slow
def test_two_ranks_that_share_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.txt"
    report = measure(tmp_path, "--tp", "2", "--trace", str(table))
    assert report["label"] == "tiny on 2 CPU ranks, uniform routing"
    assert report["execution"]["scatter_tokens"] is True
    assert report["execution"]["two_batch_overlap"] is False, "as in a server"
    batch, method = report["batch_ms"], report["method"]
    assert 0 < batch["p10"] <= batch["p50"] <= batch["p90"]
    assert batch["count"] == method["num_steps"] >= 2
    as_run = report["rates"]["as_run"]
    assert as_run["tokens_per_s"] == pytest.approx(64 * method["num_steps"] / method["seconds"])
    assert as_run["share_of_bound"] is None, "no share of a GPU's bound on a CPU"
    assert report["ttft_ms"]["p50"] > 0
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
    told = capsys.readouterr().err
    assert "no share of a bound: no data sheet for CPU" in told
    assert f"{method['num_steps']} steps in" in told
    assert "note: not in it: queues" in told


@pytest.mark.nightly
def test_ranks_with_their_own_tokens_as_a_proxy(tmp_path: Path) -> None:
    report = measure(
        tmp_path, "--dp", "2", "--shard-of", "8", "--layers", "2", "--profile", "off",
        "--ttft", "off", "--routing", "model",
    )  # fmt: skip
    label = "per-rank proxy on 2 CPU ranks, 2 of 3 layers, routing by the invented router"
    assert report["label"] == label
    assert report["profile"] is None
    assert report["ttft_ms"] is None
    assert report["tokens_per_batch"] == 128


@pytest.mark.nightly
def test_ranks_play_the_busiest_of_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two that are two of four, where a plan has placed experts and their spares."""
    report = measure(
        tmp_path, "--dp", "2", "--shard-of", "4", "--routing", "skewed", "--play-ranks", "planned",
        "--set", "prefill.num_redundant_experts=8", "--layers", "2", "--ttft", "off",
    )  # fmt: skip
    assert "the busiest of 4 ranks among those played, experts moved by a plan" in report["label"]
    played = report["played"]
    assert (played["whole_ranks"], played["whole_redundant_experts"]) == (4, 16)
    assert all(len(set(ranks)) == 2 for ranks in played["ranks"])
    assert played["received_over_mean"][0] == pytest.approx(
        played["whole_busiest_over_mean"], rel=0.02
    )
    assert sum(played["received_over_mean"]) == pytest.approx(2.0)
    assert played["modelled_experts_ms_of_h200"] > 0
    gemms = [row["ms"] for row in report["profile"]["stages"] if row["stage"] == "grouped_mlp"]
    assert report["experts_ms"]["gemms"] == pytest.approx(sum(gemms))
    assert report["experts_ms"]["rows"] > 0
    assert "rank 0 gets" in capsys.readouterr().err


def test_a_rank_alone_in_two_micro_batches_is_refused_as_in_a_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*COMMAND, "--batch-tokens", "64", "--set", "prefill.two_batch_overlap=on"]) == 2
    assert "prefill.two_batch_overlap = 'on'" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("drafts", ["on", "off"])
def test_with_the_layer_for_drafts_as_where_decode_has_some(
    tmp_path: Path, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the worker's own: behind every step, and its KV is the pool's last layer."""
    run, passes = PromptDrafts.run, []

    def counted(self: PromptDrafts, *arguments: Any) -> Any:
        passes.append(self.kv_pool.num_mtp_layers)
        return run(self, *arguments)

    monkeypatch.setattr(PromptDrafts, "run", counted)
    report = measure(tmp_path, "--drafts", drafts, "--profile", "off")
    assert report["options"]["drafts"] is (drafts == "on")
    assert report["ttft_ms"]["p50"] > 0
    assert set(passes) == ({1} if drafts == "on" else set())
    assert ("the layer for drafts runs behind every step" in report["notes"]) is (drafts == "on")


@pytest.mark.nightly
def test_short_prompts_behind_a_cached_prefix(tmp_path: Path) -> None:
    report = measure(tmp_path, "--cached-len", "128", "--profile", "off")
    assert report["options"]["cached_len"] == 128
    assert report["tokens_per_batch"] == 64, "what runs"
    assert report["ttft_ms"]["p50"] > 0


def test_a_prefix_that_no_cache_can_hold_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--batch-tokens", "64", "--cached-len", "100"]) == 2
    assert "cached-len = 100" in capsys.readouterr().err
