"""Ranks of a group replay their steps, run them one by one, or refuse to start: all the same."""

import os
import subprocess
import sys

import pytest

from deploy.ports import free_port

pytestmark = pytest.mark.slow
WORLD = 2


def run_ranks(error: str, wanted: str) -> list[str]:
    """What each rank says in the end; rank 1 fails."""
    port = free_port("127.0.0.1")
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.decode.capture_main"),
                *(str(rank), str(WORLD), str(port), error, wanted),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        return [process.communicate(timeout=120)[0].strip() for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_all_capture() -> None:
    assert run_ranks("none", "on") == ["graphs"] * WORLD


def test_one_that_cannot_capture_leaves_no_graphs_to_anybody() -> None:
    assert run_ranks("forbidden", "auto") == ["no graphs"] * WORLD


def test_nor_does_anybody_start_where_graphs_are_asked_for() -> None:
    first, second = run_ranks("forbidden", "on")
    assert first == (
        "refused decode.cuda_graphs: the step of rank 1 cannot be captured; its log says why"
    )
    assert second.endswith("operation not permitted when stream is capturing")


def test_one_without_memory_refuses_and_its_peers_do_not_wait() -> None:
    first, second = run_ranks("memory", "auto")
    assert second.startswith("refused decode.max_num_seqs: the captured steps did not fit")
    assert first.startswith("lost"), first
    assert float(first.split()[1]) < 60.0  # of 240 that the meeting may take
