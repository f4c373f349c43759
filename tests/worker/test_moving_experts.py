"""Real ranks whose experts move over sockets while they decode give the tokens of ranks at rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.parallel.processes import free_ports, run_rank_processes
from tests.engine.tiny import tiny_config, write_checkpoint

TIMEOUT_S = 600


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moving")
    write_checkpoint(folder, tiny_config(num_nextn_predict_layers=0), seed=3)
    return folder


def run_ranks(
    world: int,
    checkpoint: Path,
    folder: Path,
    mode: str,
    *,
    num_turns: int = 4,
    seconds: float = 1e6,
) -> list[dict[str, Any]]:
    port = free_ports(1)
    files = [folder / f"{mode}-{rank}.json" for rank in range(world)]
    run_rank_processes(
        "tests.worker.moving_main",
        world,
        lambda rank: (rank, world, port, checkpoint, files[rank], mode, num_turns, seconds),
        folder,
        timeout_s=TIMEOUT_S,
    )
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_text_is_that_of_ranks_whose_experts_stand(
    world: int, checkpoint: Path, tmp_path: Path
) -> None:
    expected = [rank["tokens"] for rank in run_ranks(world, checkpoint, tmp_path, "standing")]
    for mode in ("random", "planned", "faults", "host", "half"):
        ranks = run_ranks(world, checkpoint, tmp_path, mode)
        assert [rank["tokens"] for rank in ranks] == expected, mode
        assert len({rank["epoch"] for rank in ranks}) == 1
        assert ranks[0]["epoch"] > 0, mode
        assert all(rank["problem"] == "" for rank in ranks), mode
        assert bool(ranks[0]["retreats"]) == (mode == "faults"), mode
        fetched, moved = sum(rank["host_moves"] for rank in ranks), ranks[0]["moves"]
        assert bool(fetched) == (mode in ("host", "half")), mode
        assert fetched < moved or mode == "host"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_dies_in_the_middle_of_a_move_ends_the_others(
    checkpoint: Path, tmp_path: Path
) -> None:
    expected = [rank["tokens"] for rank in run_ranks(2, checkpoint, tmp_path, "standing")]
    alive, dead = run_ranks(2, checkpoint, tmp_path, "kill")
    assert not dead
    assert alive["error"] == "PeerLostError"
    assert alive["tokens"] == expected[0][: len(alive["tokens"])]
    assert len(alive["tokens"]) == 2
