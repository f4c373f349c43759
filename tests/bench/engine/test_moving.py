"""Experts move in `bench` as in a worker: what it says of them, on CPU ranks with a small model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.engine.moving import Stretch, WatchedExperts
from deploy.cli import main
from engine.experts.counter import ExpertCounter
from engine.experts.placements import ExpertPlacements
from engine.experts.rebalancer import Stage
from experts.windows import LoadWindow

pytestmark = pytest.mark.nightly

COMMON = "--device cpu --model-shape tiny --layers 2 --dp 2 --warm-up 0 --profile off"
DECODE = "decode --batch 3 --context-lens 40-70 --output-len 9 --routing model --temperature 0.3"
PREFILL = "prefill --shard-of 8 --prompt-len 64 --batch-tokens 64 --ttft off --routing skewed"


def window(first: int) -> LoadWindow:
    return LoadWindow(first_pass=first, end_pass=first + 1, counts_LE=np.ones((1, 4), np.int64))


def test_a_stretch_takes_its_passes_and_no_others() -> None:
    stretch = Stretch(np.zeros((1, 4), np.int64), 5, 2)
    for first in range(3, 9):
        stretch.take(window(first))
    assert [taken.first_pass for taken in stretch.windows] == [5, 6]


class FakeMover:
    """A rebalancer that does what a script says, a stage a step; a flip where the epoch grows."""

    def __init__(self, *stages: tuple[Stage, int]) -> None:
        self._script = [stage for stage, times in stages for _ in range(times)]
        self.stage, self.epoch = Stage.RESTING, 0
        self.counts = SimpleNamespace(num_plans=0, num_rounds=0)

    def say(self) -> None:
        pass

    def hear(self, verdict: object, *, has_work: bool) -> None:
        before, self.stage = self.stage, self._script.pop(0)
        self.counts.num_plans += before is Stage.PLANNING and self.stage is not Stage.PLANNING
        self.counts.num_rounds += before is Stage.CHECKING and self.stage is not Stage.CHECKING


@pytest.mark.parametrize("ahead", [0, 1])
def test_steps_have_the_name_of_what_runs_beside_them(ahead: int) -> None:
    counter = ExpertCounter((0,), 4, 1)
    placements = ExpertPlacements([(0, 1, 2, 3)], 4, can_change=True)
    experts = SimpleNamespace(counter=counter, placements=placements, num_ranks=2)
    mover = FakeMover(
        (Stage.RESTING, 7), (Stage.PLANNING, 2), (Stage.FREE, 1), (Stage.SENDING, 1),
        (Stage.CHECKING, 1), (Stage.RESTING, 40),
    )  # fmt: skip
    moving = SimpleNamespace(rebalancer=mover, follow_load=lambda: None, close=lambda: None)
    watched = WatchedExperts(experts, lambda feed: moving, interval_steps=8)  # type: ignore[arg-type, return-value]
    watched.attach(lambda work: work(), runs_ahead=ahead > 0)
    while not watched.is_done:
        watched.say()
        watched.hear(None, has_work=True)  # type: ignore[arg-type]
        watched.passed()
    names = watched.kinds
    assert names[:5] == ["recorded"] * 5
    begun = 8 - ahead
    assert names[5:begun] == ["before"] * (begun - 5)
    assert names[begun : begun + 5] == ["planning", "planning", "free", "sending", "checking"]
    assert set(names[begun + 5 :]) == {"before", "recorded", "after"}
    assert names[-1] == "after"
    assert watched.after is not None
    assert len(watched.before.windows) == len(watched.after.windows) == 4


def rows(tmp_path: Path, *lines: str) -> list[dict[str, Any]]:
    path, out = tmp_path / "rows.txt", tmp_path / "out.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    assert main(["bench", "rows", str(path), "--json", str(out), "--add", COMMON]) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


@pytest.mark.timeout(600)
def test_text_is_that_of_experts_that_stand(tmp_path: Path) -> None:
    log, on = tmp_path / "log.npz", "--set decode.rebalance_experts=on"
    how = "--set decode.rebalance_objective=rows --set decode.rebalance_min_gain=0"
    every = "--set decode.rebalance_interval_steps=10"
    standing, moving = rows(
        tmp_path,
        f"{DECODE} {every} --seconds 0.1 --min-steps 60 --step-log {log}",
        f"{DECODE} {every} {on} {how} --seconds 4 --same-text-as {log}",
    )
    assert standing["experts"]["moves"] is None
    assert standing["experts"]["after"] is None
    moves, text = moving["experts"]["moves"], moving["text"]
    assert moves["rounds"] == moves["epoch"] > 0
    assert moves["experts"] >= moves["rounds"]
    assert moves["bytes_received"] > 0
    assert (moves["retreats"], moves["problem"]) == (0, "")
    assert moving["experts"]["after"] is not None
    assert moving["step_tail_ms"]["flip"]["count"] > 0
    assert text["distinct"] > text["tokens"] / 20
    assert text["compared"]["differing_tokens"] == 0
    assert text["compared"]["steps_since_first_flip"] > 10
    assert text["compared"]["tokens"] == 6 * text["compared"]["steps"] > 0


@pytest.mark.timeout(600)
def test_text_is_that_of_experts_that_come_from_host_memory(tmp_path: Path) -> None:
    log, on = tmp_path / "log.npz", "--set decode.rebalance_experts=on"
    how = "--set decode.rebalance_objective=rows --set decode.rebalance_min_gain=0"
    every = "--set decode.rebalance_interval_steps=10"
    _, moving = rows(
        tmp_path,
        f"{DECODE} {every} --seconds 0.1 --min-steps 60 --step-log {log}",
        f"{DECODE} {every} {on} {how} --set decode.rebalance_host_gib=0.5 --seconds 4 "
        f"--same-text-as {log}",
    )
    moves = moving["experts"]["moves"]
    assert moves["experts_from_host"] > 0
    assert (moves["retreats"], moves["problem"]) == (0, "")
    assert moving["text"]["compared"]["differing_tokens"] == 0


@pytest.mark.timeout(600)
def test_a_recording_of_a_skew_and_moves_even_prefill(tmp_path: Path) -> None:
    load, every = tmp_path / "skew.npz", "--set prefill.rebalance_interval_steps=8"
    on = "--set prefill.rebalance_experts=on --set prefill.rebalance_objective=rows"
    recorded, placed, moved = rows(
        tmp_path,
        f"{PREFILL} {every} --seconds 0.1 --record-load {load}",
        f"{PREFILL} {every} --seconds 0.1 --set prefill.expert_load={load}",
        f"{PREFILL} {every} --seconds 3 {on}",
    )
    assert "routing by a synthetic skew" in recorded["label"]
    assert recorded["experts"]["before"]["of_floor"] < 0.9
    assert placed["experts"]["before"]["of_floor"] > 0.97
    assert moved["experts"]["before"]["of_floor"] < 0.9
    assert moved["experts"]["after"]["of_floor"] > 0.97
