"""The simulation of routing: the same each time, and nothing is lost in it."""

from __future__ import annotations

import json

import pytest

from bench.router.pairs.command import main
from bench.router.pairs.engines import Speeds
from bench.router.pairs.simulation import Outcome, Simulation
from bench.router.pairs.traces import TRACES

pytestmark = pytest.mark.nightly


def simulate(policy: str, trace: str, *, seed: int = 0, with_ids: bool = False) -> Outcome:
    sessions = TRACES[trace](seed, 0.1, 6.0)
    simulation = Simulation(
        policy, num_prefills=3, num_decodes=2, speeds=Speeds(), with_ids=with_ids
    )
    outcome = simulation.run(sessions)
    assert len(outcome.ttfts_s) == sum(len(session.turns) for session in sessions)
    assert all(
        ttft_s > floor_s - 1e-9
        for ttft_s, floor_s in zip(outcome.ttfts_s, outcome.floors_s, strict=True)
    )
    for engine in (*simulation._prefills.values(), *simulation._decodes.values()):
        engine.pool.check_integrity()
        assert engine.pool.num_free_blocks == engine.pool.num_usable_blocks
        assert simulation._prefixes.index.num_blocks(engine.key) == engine.pool.num_cached_blocks
    return outcome


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("policy", ["least-loaded", "predicted-ttft"])
def test_every_request_is_answered_once_and_the_index_is_exact(policy: str, trace: str) -> None:
    outcome = simulate(policy, trace)
    assert 0 <= outcome.num_cached_tokens < outcome.num_prompt_tokens


def test_the_same_seed_gives_the_same_figures() -> None:
    first, second = (simulate("predicted-ttft", "agents", with_ids=True).row() for _ in range(2))
    assert first == second
    assert simulate("predicted-ttft", "agents", seed=1).row() != first


def test_what_caches_hold_is_found_by_a_policy_that_asks() -> None:
    blind, asking = (simulate(p, "agents").row() for p in ("round-robin", "predicted-ttft"))
    assert asking["of_oracle"] > 0.9 > blind["of_oracle"]
    assert asking["ttft_mean_s"] < blind["ttft_mean_s"]


def test_the_command_prints_a_row_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--seconds", "1", "--trace", "agents", "--policy", "lmetric", "--seed", "0", "3"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["seed"] for row in rows] == [0, 3]
    assert {(row["trace"], row["policy"]) for row in rows} == {("agents", "lmetric")}
    assert all(row["excess_mean_s"] < row["ttft_mean_s"] for row in rows)
