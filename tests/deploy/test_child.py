"""A child process: what it says, how it ends, and that it never outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from deploy.plan import ProcessSpec
from deploy.running.child import Child, tail
from deploy.running.sweep import find_processes, is_alive, kill_processes, wait_until_gone
from tests.deploy.fakes import ROOT
from tests.waiting import wait_until

HANG = "import time; print('here', flush=True); time.sleep(60)"


def spec(folder: Path, code: str, run_id: str = "test-child") -> ProcessSpec:
    return ProcessSpec(
        name="child",
        command=(sys.executable, "-c", code),
        env={"TANDEM_CLUSTER": run_id},
        cwd=str(folder),
        log_path=str(folder / "logs" / "child.log"),
    )


def has_ended(child: Child) -> bool:
    return child.poll().exit_status is not None


def test_lines_come_whole_and_once(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "print('one', flush=True); print('tw', end='', flush=True)\n"
        "sys.stdin.read(); time.sleep(0.3); print('o', flush=True)\n"
        "print('three', end='', file=sys.stderr); sys.exit(4)"
    )
    child = Child(spec(tmp_path, code))
    seen: list[str] = []
    exits: list[int | None] = []

    def ended() -> bool:
        report = child.poll()
        seen.extend(report.lines)
        exits.append(report.exit_status)
        return report.exit_status is not None

    wait_until(ended)
    assert seen == ["one", "two", "three"]
    assert exits[-1] == 4
    assert child.poll().lines == ()
    assert tail(Path(child.spec.log_path), 2) == ["two", "three"]


def test_a_second_life_goes_on_with_the_log(tmp_path: Path) -> None:
    for _ in range(2):
        child = Child(spec(tmp_path, "print('hello')"))
        wait_until(partial(has_ended, child))
    assert tail(Path(child.spec.log_path), 9) == ["hello", "hello"]


def test_a_log_that_somebody_removes_ends_nobody(tmp_path: Path) -> None:
    child = Child(spec(tmp_path, HANG))
    wait_until(lambda: "here" in child.poll().lines)
    Path(child.spec.log_path).unlink()
    report = child.poll()
    assert (report.exit_status, report.lines) == (None, ())
    child.kill()
    assert child.poll().exit_status == -signal.SIGKILL


def test_kill_reaches_grandchildren(tmp_path: Path) -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HANG!r}])"
    run_id = f"test-kill-{os.getpid()}"
    child = Child(spec(tmp_path, code, run_id))
    wait_until(lambda: "here" in child.poll().lines)
    assert len(find_processes(run_id)) == 2
    child.kill()
    assert child.poll().exit_status == -signal.SIGKILL
    wait_until(lambda: find_processes(run_id) == [])


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, time\n"
        "from pathlib import Path\n"
        "from deploy.running.child import Child\n"
        "from tests.deploy.test_child import HANG, spec\n"
        f"child = Child(spec(Path({str(tmp_path)!r}), HANG))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    assert wait_until_gone(pid, 5)


def test_a_command_that_is_not_there_raises(tmp_path: Path) -> None:
    wrong = ProcessSpec(
        name="child",
        command=("/nothing/here",),
        env={},
        cwd=str(tmp_path),
        log_path=str(tmp_path / "log"),
    )
    with pytest.raises(FileNotFoundError):
        Child(wrong)


def test_a_sweep_kills_only_what_bears_the_mark(tmp_path: Path) -> None:
    run_id = f"test-sweep-{os.getpid()}"
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    marked = [Child(spec(folder, HANG, run_id)) for folder in folders]
    other = Child(spec(tmp_path, HANG, run_id + "-other"))
    wait_until(lambda: len(find_processes(run_id)) == 2)
    assert kill_processes(run_id) == 2
    assert [child.poll().exit_status for child in marked] == [-signal.SIGKILL] * 2
    assert other.poll().exit_status is None
    other.kill()
