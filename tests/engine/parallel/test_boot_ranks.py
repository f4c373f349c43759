"""Ranks that boot wait long for a slow one, and not at all for a dead one."""

from pathlib import Path

import pytest

from deploy.ports import free_port
from tests.engine.parallel.processes import words_of_ranks

pytestmark = pytest.mark.slow


def run_pair(case: str, folder: Path) -> list[str]:
    """What each rank says in the end."""
    port = free_port("127.0.0.1")
    module = "tests.engine.parallel.boot_main"
    return words_of_ranks(module, 2, lambda rank: (rank, port, case), folder, timeout_s=240)


def test_a_slow_rank_is_waited_for_while_booting(tmp_path: Path) -> None:
    assert run_pair("slow", tmp_path) == ["met", "met"]


def test_a_slow_rank_is_given_up_afterwards(tmp_path: Path) -> None:
    first, _ = run_pair("hangs", tmp_path)
    assert first.startswith("lost")


def test_a_dead_rank_is_noticed_within_seconds(tmp_path: Path) -> None:
    first, second = run_pair("dies", tmp_path)
    assert second == ""
    assert first.startswith("lost")
    assert float(first.split()[1]) < 30.0  # of 120 that a boot may take
