"""Gathered dispatch between real processes, up to eight of them."""

from pathlib import Path

import pytest

from deploy.ports import free_port
from tests.engine.parallel.processes import run_rank_processes


@pytest.mark.slow
@pytest.mark.parametrize("world", [8])
def test_processes(world: int, tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    run_rank_processes(
        "tests.engine.parallel.gathered_main",
        world,
        lambda rank: (rank, world, port),
        tmp_path,
        timeout_s=280,
    )
