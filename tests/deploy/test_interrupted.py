"""The controller is killed in the middle of each operation: the next one ends it, and says so."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.control.events import EventKind, EventLog, interrupted, read_events
from deploy.running.sweep import find_processes
from deploy.state import Phase
from runtime.config import ClusterConfig
from runtime.config.file import dump_config, load_config
from tests.deploy.fakes import ROOT
from tests.deploy.test_run import FakeRun, fake_run
from tests.waiting import wait_until

WHO = "ada@host"
NEVER_EMPTY = ("FAKE_DECODE_0", "FAKE_DECODE_1", "FAKE_DECODE_2")


def log_of(path: Path, *lines: tuple[EventKind, str]) -> EventLog:
    log = EventLog(path)
    for kind, text in lines:
        log.add(kind, text, who=WHO)
    return EventLog(path)


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        ([], []),
        ([(EventKind.SCALE, "a")], ["a"]),
        ([(EventKind.SCALE, "a"), (EventKind.DONE, "a: it is so")], []),
        ([(EventKind.SCALE, "a"), (EventKind.FAILED, "a: no room")], []),
        ([(EventKind.SCALE, "a"), (EventKind.DONE, "ab: it is so")], ["a"]),
        ([(EventKind.DEATH, "a"), (EventKind.APPLY, "b"), (EventKind.DRAIN, "c")], ["b", "c"]),
        ([(EventKind.SCALE, "a"), (EventKind.DONE, "a: 1"), (EventKind.SCALE, "a")], ["a"]),
    ],
)
def test_operations_without_an_end_are_found(
    tmp_path: Path, lines: list[tuple[EventKind, str]], texts: list[str]
) -> None:
    log = log_of(tmp_path / "events.jsonl", *lines)
    assert [event.text for event in interrupted(log.newest())] == texts


class KeptRun:
    """A cluster that outlives its controller, and commands that are under way when that dies."""

    def __init__(self, run: FakeRun) -> None:
        self.run = run

    def kill_while(self, *words: str, says: str, by: int = signal.SIGKILL) -> None:
        """End the controller when the command has told of `says`; then start another one."""
        command = [sys.executable, "-m", "deploy", *words]
        if words[0] != "apply":
            command += ["--config", str(self.run.config_path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as asking:
            assert asking.stdout is not None
            for line in asking.stdout:
                if says in line:
                    self.run.process.send_signal(by)
                    break
            else:
                pytest.fail(f"{words} never said {says!r}")
            self.run.process.wait(60)
            asking.stdout.read()
            assert asking.wait(60) != 0
        self.run.start()
        self.run.wait_ready()

    def wait_finished(self, what: str) -> None:
        """Wait until the events tell that `what` broke off, and that the rest was done."""
        broken = f"{what}: its controller ended before it did"
        finished = f"finish what a controller left: {what}: "

        def is_told() -> bool:
            events = read_events(self.run.run_dir.events_path)
            told = {(event.kind, event.text) for event in events}
            ends = [k for k, text in told if text.startswith(finished)]
            return (EventKind.FAILED, broken) in told and EventKind.DONE in ends

        wait_until(is_told, f"{what} is finished", 120.0)

    def instances(self, role: str) -> list[str]:
        return sorted({one.instance for one in self.run.state().processes if one.role == role})

    def wait_whole(self, role: str, count: int) -> None:
        """Wait until so many serve, as is wanted, and there is no process besides."""

        def is_whole() -> bool:
            processes = self.run.state().processes
            return len(self.instances(role)) == count and all(
                one.phase is Phase.READY for one in processes
            )

        wait_until(is_whole, f"{count} instances of {role} serve", 120.0)
        config = load_config(self.run.run_dir.config_path)
        section = config.decode if role == "decode" else config.prefill
        assert section.instances == count
        running = {p.pid for p in find_processes(self.run.state().run_id) if _is_role(p.cmdline())}
        assert {one.pid for one in self.run.state().processes} == running


def _is_role(command: list[str]) -> bool:
    return "tests.deploy.fake_role" in command


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptRun]:
    """One cluster for all tests of this file; decode never has done with its requests."""
    os.environ |= dict.fromkeys(NEVER_EMPTY, "never-empty")
    try:
        with fake_run(tmp_path_factory.mktemp("kept"), on_controller_loss="keep") as run:
            yield KeptRun(run)
    finally:
        for name in NEVER_EMPTY:
            del os.environ[name]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_what_a_killed_controller_began_is_finished_or_undone(kept: KeptRun) -> None:
    """Each operation begins with what the one before has left."""
    kept.kill_while("scale", "decode", "3", says="starts")
    kept.wait_finished("scale decode from 1 to 3")
    kept.wait_whole("decode", 3)

    kept.kill_while("scale", "decode", "1", says="drains")
    kept.wait_finished("scale decode from 3 to 1")
    kept.wait_whole("decode", 1)

    # Between "serves" and "drains": one more serves than is wanted.
    kept.kill_while("restart", "decode", "--rolling", says="serves after")
    kept.wait_finished("rolling restart of decode")
    kept.wait_whole("decode", 1)

    kept.kill_while("scale", "decode", "2", says="starts")
    kept.wait_whole("decode", 2)
    kept.kill_while("drain", "decode-1", says="drains", by=signal.SIGTERM)
    kept.wait_finished("drain decode-1")
    kept.wait_whole("decode", 2)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_an_application_that_broke_off_is_carried_to_its_end(kept: KeptRun, tmp_path: Path) -> None:
    config: ClusterConfig = load_config(kept.run.run_dir.config_path)
    prefill = dataclasses.replace(config.prefill, instances=2, max_num_batched_tokens=128)
    wanted = tmp_path / "wanted.toml"
    wanted.write_text(dump_config(dataclasses.replace(config, prefill=prefill)))
    kept.kill_while("apply", str(wanted), says="will take the place")
    wait_until(
        lambda: any(
            event.kind is EventKind.DONE and "finish what a controller left: apply" in event.text
            for event in read_events(kept.run.run_dir.events_path)
        ),
        "it is finished",
        120.0,
    )
    kept.wait_whole("prefill", 2)
    for process in kept.run.state().processes:
        if process.role == "prefill":
            read = load_config(Path(process.config_path)).prefill
            assert read.max_num_batched_tokens == 128, process
