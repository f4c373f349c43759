"""`tandem experts` tells people and programs what a trace shows, and refuses what cannot be."""

import json
from pathlib import Path

import numpy as np
import pytest

from deploy.cli import main
from experts.trace import ExpertTrace


@pytest.fixture
def skewed(tmp_path: Path) -> Path:
    """Two layers of 16 experts; expert 5 of layer 1 gets a third of all choices."""
    generator = np.random.default_rng(0)
    likely = np.full((2, 16), 1 / 16)
    likely[1] = np.where(np.arange(16) == 5, 1 / 3, 2 / 45)
    rows = [[generator.multinomial(400, likely[layer]) for layer in range(2)] for _ in range(6)]
    trace = ExpertTrace(
        counts_NLE=np.array(rows, np.int64),
        tokens_N=np.full(6, 200),
        role="prefill",
        model_name="small",
        top_k=2,
        num_ranks=4,
        hidden_size=7168,
        moe_intermediate_size=2048,
        expert_bytes=44_050_944,
    )
    path = tmp_path / "prefill.npz"
    trace.save(path)
    return path


def test_show_names_the_hottest_expert_and_the_share_of_the_floor(
    skewed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experts", "show", str(skewed)]) == 0
    shown = capsys.readouterr().out
    assert "small, prefill" in shown
    assert "2 layers of 16 experts, 2 a token" in shown
    assert "6 passes of 200 tokens on 4 ranks of 1 hosts" in shown
    assert "layer 1" in shown
    assert "% of the noise floor" in shown


def test_show_tells_programs_the_same(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experts", "show", str(skewed), "--json", "--ranks", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["role"], told["layers"], told["tokens_per_pass"]) == ("prefill", 2, 200.0)
    assert told["now"]["worst_layer"] < told["now"]["overall"] < told["floor"]["overall"]
    assert told["now"]["worst_layer_index"] == 1
    hottest = told["hottest"][0]
    assert (hottest["layer"], hottest["expert"]) == (1, 5)
    assert hottest["times_mean"] == pytest.approx(16 / 3, rel=0.1)


def test_ranks_that_cannot_share_the_experts_are_refused(
    skewed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experts", "show", str(skewed), "--ranks", "5"]) == 2
    assert "--ranks = 5" in capsys.readouterr().err


def test_a_missing_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experts", "show", str(tmp_path / "none.npz")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_simulate_says_what_a_plan_and_redundant_experts_bring(
    skewed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experts", "simulate", str(skewed), "--redundant", "4", "--role", "prefill"]) == 0
    shown = capsys.readouterr().out
    assert "replayed     on 4 ranks of 1 hosts, NVIDIA H200; 3 rows planned from" in shown
    assert "of floor" in shown
    assert "redundant experts by the rows planned from, " in shown
    assert "advice       " in shown


def test_simulate_tells_programs_the_same(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "2", "--gpu", "NVIDIA H100 80GB HBM3", "--window", "2", "--json"]
    assert main(["experts", "simulate", str(skewed), *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ranks"], told["hosts"], told["gpu"]) == (2, 1, "NVIDIA H100 80GB HBM3")
    assert (told["num_window_rows"], told["num_measured_rows"]) == (2, 4)
    assert [outcome["is_planned"] for outcome in told["outcomes"]] == [False, True]
    assert told["advice"]


def test_simulate_plans_by_rows_too(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    even = []
    for objective in ("time", "rows"):
        words = ["--objective", objective, "--horizon", "1", "--json"]
        assert main(["experts", "simulate", str(skewed), *words]) == 0
        told = json.loads(capsys.readouterr().out)
        even.append(told["outcomes"][1]["balancedness"]["overall"])
    assert even[0] < even[1], "a pass is too short a time for moves to pay"


@pytest.mark.parametrize(
    ("numbers", "compared"),
    [("4", [0, 0, 4, 4]), ("3..12", [4, 4, 8, 12]), ("auto", [0, 0, 4, 8, 16])],
)
def test_simulate_compares_a_number_a_range_or_what_the_planner_tries(
    skewed: Path, numbers: str, compared: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experts", "simulate", str(skewed), "--redundant", numbers, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [outcome["num_redundant"] for outcome in told["outcomes"]] == compared
    assert told["chosen_redundant"] in compared
    assert main(["experts", "simulate", str(skewed), "--redundant", numbers]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" most") == 1
    assert f"chosen       {told['chosen_redundant']} redundant experts" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--role", "decode"], "--role = 'decode'"),
        (["--gpu", "abacus"], "--gpu = 'abacus'"),
        (["--ranks", "3"], "Fix: 2"),
        (["--other-ms", "-1"], "--other-ms = -1.0"),
        (["--horizon", "0"], "--horizon = 0"),
        (["--window", "6"], "Fix: 1 to 5"),
        (["--redundant", "some"], "Fix: a number, 0..32, or auto"),
        (["--redundant", "3"], "Fix: 0"),
        (["--redundant", "1..3"], "Fix: 1..4"),
        (["--redundant", "4..1"], "Fix: 4..4"),
    ],
)
def test_simulate_refuses_what_cannot_be(
    skewed: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experts", "simulate", str(skewed), *words]) == 2
    assert says in capsys.readouterr().err
