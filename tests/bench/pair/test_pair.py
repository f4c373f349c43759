"""`bench pair` end to end on CPU ranks with a small model, as a person would run it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from deploy.plan import Role, default_entrypoints

COMMAND = ["bench", "pair", "--device", "cpu", "--model-shape", "tiny", "--layers", "2"]
SIZES = ["--prompt-len", "90", "--output-len", "8", "--batch", "4", "--batch-tokens", "96"]
TIMES = ["--seconds", "2", "--warm-up", "0.2", "--transport", "loopback"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def measure(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    line = [*COMMAND, *SIZES, *TIMES, *arguments, "--json", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tandem", *line])  # the report says how it was made
        assert main(line) == 0
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


@pytest.mark.nightly
def test_two_ranks_each_kept_busy(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    ranks = ["--prefill-tp", "2", "--decode-dp", "2", "--decode-len", "160"]
    report = measure(tmp_path, *ranks, "--logs", str(logs))
    assert report["label"].startswith("pair of tiny: prefill TP2, decode DP2, on 4 CPU ranks")
    assert report["num_failed"] == 0
    assert report["pools_empty"] is True
    pair, alone = report["pair"], report["decode_alone"]
    assert alone["num_running"] == 8
    assert alone["num_requests"] == 8
    assert pair["num_requests"] > 0
    assert pair["input_tokens_per_s"] == pytest.approx(90 * pair["prefilled_per_s"])
    assert 91 <= pair["mean_context"] <= 97
    assert alone["mean_context"] < 130, "nearer to the pair's than to 90 + 160 / 2"
    assert report["warm"]["compiled"] == []
    assert pair["output_tokens_per_s"] == pytest.approx(8 * pair["requests_per_s"])
    # On a machine that is busy all tokens of an answer may be read at once.
    assert 0 <= pair["tpot_ms"]["p50"] <= pair["tpot_ms"]["p99"]
    assert {"kv_exposed", "kv_transfer", "prefill_queue"} <= set(pair["stages_ms"])
    slower = report[f"{report['slower_side']}_alone"]["requests_per_s"]
    assert report["ratio"] == pytest.approx(pair["requests_per_s"] / slower)
    workers = pair["workers"]
    assert 0 < workers["decode"]["running"] <= 8
    assert workers["prefill"]["tokens_per_step"] >= 40
    assert pair["compiled"] == []
    assert report["command"].startswith("python -m deploy ")
    names = {path.name for path in logs.glob("*.log")}
    assert names == {
        "router.log", "prefill-0-0.log", "prefill-0-1.log", "decode-0-0.log", "decode-0-1.log",
    }  # fmt: skip


def test_a_process_that_cannot_start_ends_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {Role.PREFILL: (sys.executable, "-c", "import sys; sys.exit('no GPU today')")}
    entrypoints = {**default_entrypoints(), **broken}
    monkeypatch.setattr("bench.pair.cluster.default_entrypoints", lambda: entrypoints)
    assert main([*COMMAND, *SIZES, *TIMES]) == 1
    error = capsys.readouterr().err
    assert "prefill-0 ended with status 1" in error
    assert "no GPU today" in error
    assert "Traceback" not in error
