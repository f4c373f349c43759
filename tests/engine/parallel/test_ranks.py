"""Real ranks over gloo: 2 and 4 processes give the tokens of one, and notice a lost peer."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.build import build_model
from engine.generate import generate
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import init_process_groups
from runtime.errors import PeerLostError
from tests.engine.parallel.rank_main import GREEDY, PROMPTS
from tests.engine.test_fp8_path import CONFIG as FP8_CONFIG
from tests.engine.tiny import tiny_config, write_checkpoint

NUM_MODES = 12
TIMEOUT_S = 100
MAX_FP8_ERROR = 0.16
"""As a share of the norm, like that of activations in FP8: other orders of summation and forms of
attention round to other neighbours. A mistake would differ by everything."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), tiny_config(), seed=3)


@pytest.fixture(scope="module")
def fp8_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Wide enough that a quarter of every split matrix is whole blocks of scales.
    config = {**FP8_CONFIG, "intermediate_size": 512, "moe_intermediate_size": 128}
    return write_checkpoint(tmp_path_factory.mktemp("fp8"), config, fp8=True)


@pytest.fixture(scope="module")
def one_rank(checkpoint: Path) -> list[list[int]]:
    outputs = generate(build_model(checkpoint), PROMPTS, GREEDY)
    tokens = [output.token_ids for output in outputs]
    assert len({tuple(part) for part in tokens}) == len(PROMPTS), "prompts must tell apart"
    return tokens


def _free_ports(count: int) -> int:
    """Return the first of `count` neighbouring ports that are free now."""
    for first in range(20011, 60000, 97):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


def run_ranks(world: int, checkpoints: tuple[Path, Path], folder: Path) -> list[dict[str, Any]]:
    """Start the processes, wait, and return each rank's results by mode."""
    port = _free_ports(NUM_MODES)
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.engine.parallel.rank_main",
                *map(str, (rank, world, port, *checkpoints, folder / f"{rank}.json")),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 0, error[-2000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_give_the_tokens_of_one(
    world: int, checkpoint: Path, fp8_checkpoint: Path, one_rank: list[list[int]], tmp_path: Path
) -> None:
    results = run_ranks(world, (checkpoint, fp8_checkpoint), tmp_path)
    for rank, result in enumerate(results):
        assert result["tp"] == one_rank
        assert result["tp+ep"] == [one_rank] * 2
        assert result["dp+ep"] == [one_rank[rank::world]] * 2
        for mode in ("tp layouts", "layouts", "dp layouts"):
            assert max(result[mode].values()) < 1e-5, (mode, result[mode])
        for mode in ("fp8", "dp fp8"):
            assert max(result[mode].values()) < MAX_FP8_ERROR, (mode, result[mode])
        for mode in ("experts", "dp experts"):
            assert result[mode] < 0.01, mode  # of sums in bfloat16
        assert result["all_to_all"] <= 1.0
        assert result["lost"] == ("died" if rank == world - 1 else "noticed")


def test_nobody_at_the_rendezvous() -> None:
    dims = ParallelDims(tp=2, rank=1)
    with pytest.raises(PeerLostError, match=r"127\.0\.0\.1:1"):
        init_process_groups(dims, "127.0.0.1:1", timeout_s=1)
