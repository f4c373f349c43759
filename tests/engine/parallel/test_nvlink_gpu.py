"""The exchange over NVLink between real processes: exact under load, eager and in CUDA graphs.

More ranks than there are GPUs share them; what is measured then is patience, not speed.
"""

import json
from pathlib import Path

import pytest
import torch

from deploy.ports import free_port
from tests.engine.parallel.nvlink_main import WAIT_SECONDS
from tests.engine.parallel.processes import run_rank_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("default"),
]


def run_ranks(num_ranks: int, folder: Path, *modes: str) -> list[dict[str, dict[str, object]]]:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if num_ranks > max(2, torch.cuda.device_count()):
        pytest.skip(f"needs {num_ranks} GPUs")
    port = free_port("127.0.0.1")
    run_rank_processes(
        "tests.engine.parallel.nvlink_main",
        num_ranks,
        lambda rank: (rank, num_ranks, port, folder / f"{rank}.json", *modes),
        folder,
        timeout_s=400,
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_results_are_exact_under_load(num_ranks: int, tmp_path: Path) -> None:
    for rank, results in enumerate(run_ranks(num_ranks, tmp_path)):
        for name, result in results.items():
            if rank == 0:
                print(f"{num_ranks} ranks, {name}: {result}")
            assert result["right"] == result["count"], f"rank {rank}, {name}: {result}"
            assert result["count"]


def test_a_lost_rank_is_an_error_in_time(tmp_path: Path) -> None:
    """It is raised and says why, after the patience that was asked for; nobody hangs."""
    survivor, lost = (result["lost"] for result in run_ranks(2, tmp_path, "lost"))
    print(survivor)
    assert "as it does when another rank is lost" in str(survivor["error"])
    # The GPU counts cycles, of a clock that changes.
    assert 0.5 * WAIT_SECONDS < float(str(survivor["seconds"])) < 5 * WAIT_SECONDS
    assert not lost["error"]
