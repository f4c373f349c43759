"""Ranks that torchrun starts meet, although its own store has the port that it tells them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.torchrun import rendezvous_of
from deploy.ports import free_port


def test_ranks_that_were_started_by_hand_meet_where_they_are_told() -> None:
    environment = {"RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "9"}
    assert rendezvous_of(environment) == "host:9"
    assert rendezvous_of({**environment, "TORCHELASTIC_USE_AGENT_STORE": "False"}) == "host:9"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_of_torchrun_meet(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    command += ["-m", "tests.bench.torchrun_main", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["[0, 1]"] * 2
