"""``tandem up`` on a machine whose cores are all taken, twice over: it starts, each time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.running.sweep import find_processes
from tests.deploy.test_up import Cluster

NUM_STARTS = 10

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(NUM_STARTS * 900)]


@contextlib.contextmanager
def busy_loops(number: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize("number", range(NUM_STARTS))
def test_a_start_beside_busy_loops(tmp_path: Path, number: int) -> None:
    cluster = Cluster(tmp_path, f"busy-{number}")
    with busy_loops(2 * (os.cpu_count() or 1)):
        try:
            result = cluster.tandem("up", "--detach", str(cluster.config_path))
            assert result.returncode == 0, result.stdout + result.stderr
            run_id = cluster.run_id
            assert cluster.generate()
        finally:
            cluster.tandem("down", "--now", "--config", str(cluster.config_path))
    assert find_processes(run_id) == []
