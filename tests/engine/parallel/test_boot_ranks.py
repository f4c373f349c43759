"""Ranks that boot wait long for a slow one, and not at all for a dead one."""

import os
import subprocess
import sys

import pytest

from deploy.ports import free_port

pytestmark = pytest.mark.slow


def run_pair(case: str) -> list[str]:
    """What each rank says in the end."""
    port = free_port("127.0.0.1")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.parallel.boot_main", str(rank), str(port), case],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [process.communicate(timeout=240)[0].strip() for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_a_slow_rank_is_waited_for_while_booting() -> None:
    assert run_pair("slow") == ["met", "met"]


def test_a_slow_rank_is_given_up_afterwards() -> None:
    first, _ = run_pair("hangs")
    assert first.startswith("lost")


def test_a_dead_rank_is_noticed_within_seconds() -> None:
    first, second = run_pair("dies")
    assert second == ""
    assert first.startswith("lost")
    assert float(first.split()[1]) < 30.0  # of 120 that a boot may take
