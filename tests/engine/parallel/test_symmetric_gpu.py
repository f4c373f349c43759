"""Collectives over symmetric memory between real GPUs: exact under load, slots reused often."""

import json
from pathlib import Path

import pytest
import torch

from deploy.ports import free_port
from tests.engine.parallel.processes import run_rank_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_results_are_exact_under_load(num_ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    port = free_port("127.0.0.1")
    run_rank_processes(
        "tests.engine.parallel.symmetric_main",
        num_ranks,
        lambda rank: (rank, num_ranks, port, tmp_path / f"{rank}.json"),
        tmp_path,
        timeout_s=300,
    )
    for rank in range(num_ranks):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        for name, result in results.items():
            if rank == 0:
                print(f"{num_ranks} ranks, {name}: {result}")
            assert result["right"] == result["count"] > 0, f"rank {rank}, {name}: {result}"
