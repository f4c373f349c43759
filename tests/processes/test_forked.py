"""A process that is forked is to a test what one that is started is."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes.forked import ForkedProcess, ForkServer

pytestmark = pytest.mark.nightly

ECHO = "tests.processes.echo"
Start = Callable[..., ForkedProcess]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(["decimal"])
    yield server
    server.close()


@pytest.fixture
def start(server: ForkServer, tmp_path: Path) -> Start:
    def start(*arguments: str, **environment: str) -> ForkedProcess:
        with (tmp_path / "log").open("ab") as output:
            return server.start(
                [ECHO, *arguments], environment={**os.environ, **environment}, output=output
            )

    return start


def test_it_is_the_main_module_of_a_session_of_its_own_with_its_environment(
    start: Start, tmp_path: Path
) -> None:
    first, second = start("exit", "0", WHO="a"), start("leave", WHO="b")
    assert (first.wait(60), second.wait(60)) == (0, 0)
    third = start("exit", "0")
    assert third.wait(60) == 0
    lines = sorted((tmp_path / "log").read_text().splitlines())
    assert lines == sorted(
        [
            f"__main__ {first.pid} {first.pid} a exit 0",
            f"__main__ {second.pid} {second.pid} b leave",
            "unflushed at the end",
            f"__main__ {third.pid} {third.pid} None exit 0",
        ]
    )


@pytest.mark.parametrize("status", [0, 3])
def test_its_status_is_told_as_often_as_one_asks(start: Start, status: int) -> None:
    process = start("exit", str(status))
    assert [process.wait(60), process.poll(), process.returncode, process.wait()] == [status] * 4
    process.kill()  # it is gone


def test_an_error_ends_it_with_a_traceback(start: Start, tmp_path: Path) -> None:
    assert start("raise", "oh").wait(60) == 1
    assert (tmp_path / "log").read_text().endswith("ValueError: oh\n")


@pytest.mark.parametrize(
    ("end", "number"),
    [(ForkedProcess.terminate, signal.SIGTERM), (ForkedProcess.kill, signal.SIGKILL)],
)
def test_a_signal_ends_it_and_nobody_beside_it(
    start: Start, end: Callable[[ForkedProcess], None], number: int
) -> None:
    process, other = start("sleep"), start("sleep")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    end(process)
    assert process.wait(60) == -number
    assert other.poll() is None
    other.kill()
    assert other.wait(60) == -signal.SIGKILL


def test_it_outlives_the_server(tmp_path: Path) -> None:
    server = ForkServer([])
    with (tmp_path / "log").open("wb") as output:
        process = server.start([ECHO, "sleep"], environment=dict(os.environ), output=output)
    server.close()
    os.kill(process.pid, 0)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(AssertionError, match="the server that forks has ended"):
        process.wait(60)
    process._reports.close()
