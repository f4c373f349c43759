"""Ranks that are processes: what is wrong with one is found in its 100 first steps."""

import json
from pathlib import Path

import pytest

from runtime.stragglers.rank_waits import RankBlock, WaitWindow, window_of
from runtime.stragglers.slow_ranks import SlowKind, find_slow
from tests.engine.parallel.processes import free_ports, run_rank_processes

NUM_RANKS = 4


def run(tmp_path: Path, fault: str, num_ranks: int = NUM_RANKS) -> WaitWindow:
    port = free_ports(1)
    run_rank_processes(
        "tests.engine.parallel.waits_main",
        num_ranks,
        lambda rank: (rank, num_ranks, port, fault, tmp_path / f"{rank}.json"),
        tmp_path,
        timeout_s=200.0,
    )
    blocks = {
        rank: [RankBlock(**block) for block in json.loads((tmp_path / f"{rank}.json").read_text())]
        for rank in range(num_ranks)
    }
    window = window_of(blocks, num_ranks)
    assert window is not None
    return window


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("attention", (SlowKind.SENDER, 1, -1)),
        ("rows", (SlowKind.RECEIVER, 1, -1)),
        ("link", (SlowKind.LINK, 1, 0)),
        ("host", (SlowKind.HOST, 1, -1)),
        ("pauses", (SlowKind.HOST, 1, -1)),
    ],
)
def test_what_is_wrong_with_a_process_is_found(
    tmp_path: Path, fault: str, expected: tuple[SlowKind, int, int]
) -> None:
    found = find_slow(run(tmp_path, fault))
    assert (found[0].kind, found[0].rank, found[0].source) == expected, found
