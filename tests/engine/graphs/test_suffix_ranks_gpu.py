"""Captured steps of ranks that share heads: no way of launching them changes a bit.

Each rank has a GPU of its own, with NCCL's collectives between our kernels.
"""

import json
from pathlib import Path

import pytest
import torch

from engine.formats import deep_gemm
from tests.engine.graphs.suffix_ranks_main import NUM_ROUNDS, STEPS, WAYS
from tests.engine.parallel.processes import free_ports, run_rank_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("kind", ["suffixes", "prompts"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_no_way_of_launching_changes_a_bit(world: int, kind: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < world or not deep_gemm.is_available():
        pytest.skip(f"needs {world} Hopper GPUs with DeepGEMM")
    port = free_ports(1)
    run_rank_processes(
        "tests.engine.graphs.suffix_ranks_main",
        world,
        lambda rank: (rank, world, port, tmp_path / f"{rank}.json", "cuda", kind),
        tmp_path,
        timeout_s=500,
    )
    num_steps = len(STEPS[kind])
    for rank in range(world):
        ways = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(ways) == len(WAYS[kind])
        expected = ways[0]["sums"][:num_steps]
        for way in ways:
            *sums, kv = way.pop("sums")
            rounds = [sums[i : i + num_steps] for i in range(0, len(sums), num_steps)]
            print(f"rank {rank} of {world}: {way} {rounds[0]} {kv}")
            assert len(rounds) == NUM_ROUNDS["cuda"]
            assert all(found == rounds[0] for found in rounds), (rank, way, "rounds differ")
            assert rounds[0] == expected, (rank, way, "hidden states differ from calls")
            way["kv"] = kv
        assert len({way["kv"] for way in ways}) == 1, (rank, ways)
