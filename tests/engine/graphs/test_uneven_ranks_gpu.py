"""One rank has many requests and the other none, over NVLink's memory: graphs do what calls do.

Two processes, which share a GPU where there is one.
"""

import json
from pathlib import Path

import pytest
import torch

from deploy.ports import free_port
from tests.engine.graphs.uneven_main import COUNTS, NARROW, NUM_STEPS
from tests.engine.parallel.processes import run_rank_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("default"),
]


def test_padding_comes_to_no_expert_and_graphs_change_no_bit(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    world, port = 2, free_port("127.0.0.1")
    run_rank_processes(
        "tests.engine.graphs.uneven_main",
        world,
        lambda rank: (rank, world, port, tmp_path, tmp_path / f"{rank}.json", "cuda"),
        tmp_path,
        timeout_s=400,
    )
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    num_moe_layers = NARROW.num_hidden_layers - NARROW.first_k_dense_replace
    expected = sum(COUNTS[world]) * NARROW.num_experts_per_tok * num_moe_layers
    eager, captured = (
        [rank[f"is_fp8=True, {use_graphs=}"] for rank in ranks] for use_graphs in (False, True)
    )
    for step in range(NUM_STEPS):
        assert sum(rank["rows"][step] for rank in eager) == expected, step
    assert [len(rank["tokens"]) for rank in eager] == list(COUNTS[world])
    for mine, theirs in zip(captured, eager, strict=True):
        assert mine["tokens"] == theirs["tokens"]
        assert mine["kv"] == theirs["kv"]
