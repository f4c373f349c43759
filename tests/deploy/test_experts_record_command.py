"""`tandem experts record` and `export` refuse what cannot be by name, and sum what there is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from deploy.cli import main
from experts.trace import ExpertTrace


@pytest.fixture
def trace() -> ExpertTrace:
    counts = np.arange(3 * 2 * 4, dtype=np.int64).reshape(3, 2, 4)
    return ExpertTrace(
        counts_NLE=counts,
        tokens_N=counts.sum(axis=2).max(axis=1),
        role="decode",
        model_name="small",
        top_k=1,
        num_ranks=2,
        hidden_size=64,
        moe_intermediate_size=32,
        expert_bytes=1000,
    )


def test_an_export_has_the_sums_of_all_passes(trace: ExpertTrace, tmp_path: Path) -> None:
    trace.save(tmp_path / "decode.npz")
    out = tmp_path / "decode.json"
    assert main(["experts", "export", str(tmp_path / "decode.npz"), "--out", str(out)]) == 0
    told = json.loads(out.read_text())
    assert told["logical_count"] == trace.counts_NLE.sum(axis=0).tolist()
    assert (told["model"], told["role"], told["num_ranks"]) == ("small", "decode", 2)
    assert told["num_tokens"] == trace.tokens_N.sum()


def test_what_is_no_trace_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.npz").write_text("text")
    assert main(["experts", "export", str(tmp_path / "text.npz")]) != 0
    assert "cannot be read as a trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--passes", "0"], "no number of passes"),
        (["--seconds", "-1"], "no time"),
        (["--role", "router"], "invalid choice"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["experts", "record", "--out", "trace.npz", *words])
    assert said in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_told_before_anything_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experts", "record", "--out", str(tmp_path / "none" / "trace.npz")]) != 0
    assert "its folder does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["record", "--out", "trace.npz"], ["show"]])
def test_no_cluster_runs(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f'[cluster]\nname = "nobody"\nrun_dir = "{tmp_path}"\n')
    assert main(["experts", *words, "--config", str(file)]) != 0
    assert "nobody" in capsys.readouterr().err
