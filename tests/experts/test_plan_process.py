"""Plans are computed in a process beside the rank, which hears of whatever becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from deploy.running.sweep import is_alive, wait_until_gone
from experts.even_plan import even_rounds
from experts.plan_process import PlanProcess, compute_here
from experts.windows import LoadWindow
from runtime.errors import InternalError


@pytest.fixture
def process() -> Iterator[PlanProcess]:
    made = PlanProcess(timeout_s=120.0)
    yield made
    made.close()


def test_it_plans_as_this_process_does_and_knows_no_device(process: PlanProcess) -> None:
    assert process.pid is None, "nothing is started before it is asked for"
    counts = np.random.default_rng(3).integers(1, 1000, (3, 16))
    load = LoadWindow(first_pass=0, end_pass=10, counts_LE=counts)
    table = np.tile(np.arange(16), (3, 1))
    there = process(even_rounds, load, table, num_ranks=4, min_gain=0.0)
    assert list(there) == list(even_rounds(load, table, num_ranks=4, min_gain=0.0))
    assert list(there)
    pid = process.pid
    assert process(os.getpid) == pid != os.getpid()
    assert "numpy" in process(imported)
    assert "torch" not in process(imported)
    assert compute_here(os.getpid) == os.getpid()


def imported() -> list[str]:
    """Names that are said by the process whose `sys.modules` they are."""
    return [name for name in ("numpy", "torch") if name in sys.modules]


def test_an_error_is_told_and_the_process_goes_on(process: PlanProcess) -> None:
    with pytest.raises(InternalError, match="ValueError: expected a nonnegative number"):
        process(_root_of, -1.0)
    pid = process.pid
    assert process(_root_of, 4.0) == 2.0
    assert process.pid == pid


def _root_of(value: float) -> float:
    if value < 0:
        raise ValueError("expected a nonnegative number")
    return value**0.5


def test_a_process_that_is_killed_is_told_of_and_replaced(process: PlanProcess) -> None:
    first = process(os.getpid)
    os.kill(first, signal.SIGINT)  # of a terminal, to all of a group: the rank's to answer
    assert process(os.getpid) == first
    with pytest.raises(InternalError, match="the process of plans ended"):
        process(os._exit, 3)
    assert process(os.getpid) != first
    with pytest.raises(InternalError, match="the process of plans ended"):
        process(os.kill, process(os.getpid), signal.SIGKILL)
    assert process(os.getpid)


def test_what_never_ends_is_given_up() -> None:
    process = PlanProcess(timeout_s=0.5)
    try:
        with pytest.raises(InternalError, match=r"took more than 0\.5 s"):
            process(time.sleep, 600)
        assert process.pid is None
    finally:
        process.close()


def test_it_ends_with_the_rank() -> None:
    text = (
        "import os, time\n"
        "from experts.plan_process import PlanProcess\n"
        "process = PlanProcess()\n"
        "print(process(os.getpid), flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        assert is_alive(pid)
        rank.kill()
    assert wait_until_gone(pid, 60), "it outlives the rank"
