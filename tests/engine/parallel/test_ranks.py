"""Real ranks over gloo: 2 and 4 processes give the tokens of one, and notice a lost peer."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.boot.build import build_model
from engine.generate import generate
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import init_process_groups
from runtime.errors import PeerLostError
from tests.engine.parallel.processes import free_ports, run_rank_processes
from tests.engine.parallel.rank_main import GREEDY, PROMPTS
from tests.engine.test_fp8_path import CONFIG as FP8_CONFIG
from tests.engine.tiny import tiny_config, write_checkpoint

NUM_MODES = 10
TIMEOUT_S = 900
MAX_FP8_ERROR = 0.16
"""As a share of the norm, like that of activations in FP8: other orders of summation and forms of
attention round to other neighbours. A mistake would differ by everything."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a plain one, one without query latents, and one in FP8."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(folder / "plain", tiny_config(), seed=3)
    direct = tiny_config(q_lora_rank=None, num_hidden_layers=2, num_nextn_predict_layers=0)
    write_checkpoint(folder / "direct", direct, seed=4)
    # Wide enough that a quarter of every split matrix is whole blocks of scales.
    write_checkpoint(folder / "fp8", {**FP8_CONFIG, "intermediate_size": 512}, fp8=True)
    return folder


@pytest.fixture(scope="module")
def one_rank(checkpoints: Path) -> list[list[int]]:
    outputs = generate(build_model(checkpoints / "plain"), PROMPTS, GREEDY)
    tokens = [output.token_ids for output in outputs]
    assert len({tuple(part) for part in tokens}) == len(PROMPTS), "prompts must tell apart"
    return tokens


def run_ranks(world: int, checkpoints: Path, folder: Path) -> list[dict[str, Any]]:
    """Start the processes, wait, and return each rank's results by mode."""
    port = free_ports(NUM_MODES)
    run_rank_processes(
        "tests.engine.parallel.rank_main",
        world,
        lambda rank: (rank, world, port, checkpoints, folder / f"{rank}.json"),
        folder,
        timeout_s=TIMEOUT_S,
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_give_the_tokens_of_one(
    world: int, checkpoints: Path, one_rank: list[list[int]], tmp_path: Path
) -> None:
    results = run_ranks(world, checkpoints, tmp_path)
    for rank, result in enumerate(results):
        assert result["tp"] == one_rank
        assert result["tp+ep"] == one_rank
        assert result["dp+ep"] == [one_rank[rank::world]] * 2
        for mode in ("layouts", "tp layouts", "dp layouts"):
            for distances in result[mode]:
                assert max(distances.values()) < 1e-5, (mode, distances)
        for mode in ("fp8", "dp fp8"):
            distances = result[mode]
            assert distances.pop("experts") < 0.01, mode  # of sums in bfloat16
            assert max(distances.values()) < MAX_FP8_ERROR, (mode, distances)
        assert result["all_to_all"] <= 1.0
        assert result["lost"] == ("died" if rank == world - 1 else "noticed")


def test_nobody_at_the_rendezvous() -> None:
    dims = ParallelDims(tp=2, rank=1)
    with pytest.raises(PeerLostError, match=r"127\.0\.0\.1:1"):
        init_process_groups(dims, "127.0.0.1:1", timeout_s=1)
