"""Faults that are put in, and what ranks gather; with processes where slow tests are asked for."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.ranks.faults import captured_fault, faults_of, skewed, sleeper
from bench.ranks.live import _block_of, _numbers_of
from runtime.stragglers.rank_waits import RankBlock
from runtime.stragglers.slow_ranks import SlowKind

pytestmark = pytest.mark.nightly

NUM_RANKS, NUM_EXPERTS = 4, 32


def test_a_rank_s_experts_get_a_share_more_and_no_token_an_expert_twice() -> None:
    torch.manual_seed(1)
    scores = torch.rand(4, 3, 500, NUM_EXPERTS)
    draws = scores.topk(4, dim=-1).indices
    draws[..., 450:, :] = -1  # padding
    result = skewed(draws, 3, NUM_RANKS, NUM_EXPERTS, 0.2)
    assert result.shape == draws.shape
    assert (result[..., 450:, :] == -1).all()
    chosen = result[..., :450, :]
    ordered = chosen.sort(dim=-1).values
    assert (ordered.diff(dim=-1) > 0).all()
    mean = chosen.numel() / NUM_RANKS
    rows = [int((chosen // 8 == rank).sum()) / mean for rank in range(NUM_RANKS)]
    # A few fewer than asked for: who has the expert already keeps what it has.
    assert 1.1 < rows[3] < 1.25
    assert max(rows[:3]) < 1.0


def test_faults_say_where_they_should_be_found() -> None:
    faults = {fault.name: fault for fault in faults_of(attention=0.05, rows=0.2, link_s=2e-5)}
    assert faults["link"].places == {(SlowKind.LINK, 1, 2)}
    assert {rank for _, rank, _ in faults["attention-of-two"].places} == {0, 2}
    captured = {name for name, fault in faults.items() if fault.is_captured}
    assert captured == {"attention", "attention-of-two", "link"}


def test_only_the_host_of_the_fault_sleeps_and_only_every_so_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("bench.ranks.faults.time.sleep", slept.append)
    pauses = faults_of(attention=0.05, rows=0.2, link_s=2e-5)[-1]
    for rank in range(NUM_RANKS):
        between = sleeper(pauses, rank, 0.01)
        for _ in range(2 * pauses.every):
            between()
    assert slept == [0.01 * pauses.sleep] * 2


def test_a_fault_comes_on_top_of_what_makes_ranks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr("bench.ranks.faults.time.sleep", calls.append)
    fault = faults_of(attention=0.05, rows=0.2, link_s=2e-5)[0]
    for rank, expected in ((1, ["levelled", 0.05 * 0.004]), (0, ["levelled"])):
        routing = SimpleNamespace(before=lambda: calls.append("levelled"))
        levelled = routing.before
        place = SimpleNamespace(rank=rank)
        session: Any = SimpleNamespace(
            rank=SimpleNamespace(place=place, routing=routing), device=torch.device("cpu")
        )
        with captured_fault(fault, session, 0.004):
            routing.before()
        assert calls == expected
        assert routing.before is levelled
        calls.clear()


def test_blocks_travel_as_numbers() -> None:
    block = RankBlock(
        number=3,
        waits_s=[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]],
        own_s=[6.0, 7.0, 8.0],
        own_mean_s=[9.0, 10.0, 11.0],
        num_rows=12.0,
        num_tokens=13.0,
        num_context_tokens=14.0,
        first_waits_s=[[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]],
    )
    assert _block_of(_numbers_of(block), 2) == block


@pytest.mark.timeout(900)
def test_a_fault_is_found_among_processes(tmp_path: Path) -> None:
    """All of the benchmark, over gloo: attention of one rank takes five times as long."""
    path = tmp_path / "report.json"
    words = (
        "--device cpu --model-shape tiny --layers 3 --shard-of 0 --batch 2 --context-lens 64-80 "
        "--turns 1 --seconds 0.1 --quiet 0 --windows 1 --usual-steps 104 --attention 4 "
        "--faults attention --json"
    )
    command = [sys.executable, "-m", "bench.ranks.gpus", *words.split(), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr
    assert "false alarms" in done.stdout
    report = json.loads(path.read_text())
    (row,) = report["faults"]
    assert row["found_after_steps"] == 100
    assert report["execution"]["dispatcher"] == "AllToAllDispatcher"
    assert report["recording"]["overhead"] is not None
