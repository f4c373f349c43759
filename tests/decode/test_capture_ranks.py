"""Ranks of a group replay their steps, run them one by one, or refuse to start: all the same."""

from pathlib import Path

import pytest

from deploy.ports import free_port
from tests.engine.parallel.processes import words_of_ranks

pytestmark = pytest.mark.slow
WORLD = 2


def run_ranks(error: str, wanted: str, folder: Path) -> list[str]:
    """What each rank says in the end; rank 1 fails."""
    port = free_port("127.0.0.1")
    return words_of_ranks(
        "tests.decode.capture_main",
        WORLD,
        lambda rank: (rank, WORLD, port, error, wanted),
        folder,
        timeout_s=240,
    )


def test_all_capture(tmp_path: Path) -> None:
    assert run_ranks("none", "on", tmp_path) == ["graphs"] * WORLD


def test_one_that_cannot_capture_leaves_no_graphs_to_anybody(tmp_path: Path) -> None:
    assert run_ranks("forbidden", "auto", tmp_path) == ["no graphs"] * WORLD


def test_nor_does_anybody_start_where_graphs_are_asked_for(tmp_path: Path) -> None:
    first, second = run_ranks("forbidden", "on", tmp_path)
    assert first == (
        "refused decode.cuda_graphs: the step of rank 1 cannot be captured; its log says why"
    )
    assert second.endswith("operation not permitted when stream is capturing")


def test_one_without_memory_refuses_and_its_peers_do_not_wait(tmp_path: Path) -> None:
    first, second = run_ranks("memory", "auto", tmp_path)
    assert second.startswith("refused decode.max_num_seqs: the captured steps did not fit")
    assert first.startswith("lost"), first
    assert float(first.split()[1]) < 60.0  # of 240 that the meeting may take
