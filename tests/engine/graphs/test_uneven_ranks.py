"""One rank has many requests and others none: padding comes to no expert, and changes no token.

Real processes over gloo.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.ports import free_port
from engine.boot.build import build_model
from tests.engine.graphs.uneven_main import COUNTS, NUM_STEPS, run_plainly
from tests.engine.parallel.processes import run_rank_processes
from tests.engine.test_fp8_path import CONFIG as FP8_CONFIG
from tests.engine.tiny import tiny_config, write_checkpoint

NUM_MOE_LAYERS = 2


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, config in ("plain", tiny_config()), ("fp8", FP8_CONFIG):
        sizes = {"num_hidden_layers": 1 + NUM_MOE_LAYERS, "first_k_dense_replace": 1}
        write_checkpoint(folder / name, {**config, **sizes}, seed=3, fp8=name == "fp8")
    return folder


def run_ranks(world: int, checkpoints: Path, folder: Path) -> list[dict[str, Any]]:
    port = free_port("127.0.0.1")
    run_rank_processes(
        "tests.engine.graphs.uneven_main",
        world,
        lambda rank: (rank, world, port, checkpoints, folder / f"{rank}.json", "cpu"),
        folder,
        timeout_s=240,
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [2, 4])
def test_only_tokens_of_requests_come_to_experts(
    world: int, checkpoints: Path, tmp_path: Path
) -> None:
    counts = COUNTS[world]
    results = run_ranks(world, checkpoints, tmp_path)
    assert len(results[0]) == 2
    for mode in results[0]:
        config = FP8_CONFIG if "is_fp8=True" in mode else tiny_config()
        expected = sum(counts) * config["num_experts_per_tok"] * NUM_MOE_LAYERS
        for step in range(NUM_STEPS):
            rows = [result[mode]["rows"][step] for result in results]
            assert sum(rows) == expected, (mode, step, rows)
    alone = build_model(checkpoints / "plain")
    for rank, result in enumerate(results):
        tokens = run_plainly(alone, rank, counts[rank])
        for mode in result:
            if "is_fp8=False" in mode:
                assert result[mode]["tokens"] == tokens, (rank, mode)
