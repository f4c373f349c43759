"""Whole runs under Ray, as processes of their own: signals, crashes, a second run, what is left."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from deploy.cli import main as tandem
from deploy.ports import free_port
from deploy.ray.connection import is_reachable
from deploy.running.sweep import find_processes, is_alive, ray_folder, ray_temp_dir
from deploy.state import ClusterState, Phase, RunDir, run_dir_of
from runtime.config import ClusterConfig
from runtime.config.file import dump_config
from tests.deploy.fakes import ROOT, fake_config
from tests.waiting import wait_until

pytestmark = pytest.mark.nightly


class FakeRun:
    """One run of ``tests.deploy.fake_cluster`` and its run directory."""

    def __init__(self, folder: Path, config: ClusterConfig) -> None:
        self.config_path = folder / "cluster.toml"
        self.config_path.write_text(dump_config(config), encoding="utf-8")
        self.run_dir: RunDir = run_dir_of(config.cluster.name, str(folder))
        self.output = folder / "output"
        self.start()

    def start(self) -> None:
        """Once more, where a former one has ended."""
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.deploy.fake_cluster", str(self.config_path)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )

    def state(self) -> ClusterState:
        state = self.run_dir.read_state()
        assert state is not None
        return state

    def wait_ready(self) -> None:
        wait_until(
            lambda: "ready\n" in self.output.read_text() or self.process.poll() is not None,
            "the controller is ready, or ends",
            180.0,
        )
        assert self.process.poll() is None, self.output.read_text()


@contextmanager
def fake_run(folder: Path, **cluster: str) -> Iterator[FakeRun]:
    """A ready run; whatever the test leaves of it is killed."""
    config = fake_config(folder)
    section = dataclasses.replace(config.cluster, **cluster)
    run = FakeRun(folder, dataclasses.replace(config, cluster=section))
    try:
        run.wait_ready()
        yield run
    finally:
        run.process.kill()
        run.process.wait()
        tandem(["down", "--config", str(run.config_path)])


def pid_of(run: FakeRun, name: str) -> int:
    return next(process.pid for process in run.state().processes if process.name == name)


def test_a_role_grows_and_shrinks_and_ctrl_c_stops_everything_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_run(tmp_path) as run:
        state = run.state()
        assert state.phase is Phase.READY
        marked = {process.name() for process in find_processes(state.run_id)}
        assert {"gcs_server", "raylet"} <= marked
        assert stat.S_IMODE(ray_folder(state.run_id).stat().st_mode) == 0o700
        assert ray_temp_dir(state.run_id).is_dir()
        assert {psutil.Process(process.pid).nice() for process in state.processes} == {0}
        config = ("--config", str(run.config_path))
        assert tandem(["scale", "decode", "+1", *config]) == 0
        assert "decode-1" in {process.name for process in run.state().processes}
        assert tandem(["scale", "decode", "99", *config]) == 3
        error = capsys.readouterr().err
        assert "each takes 1 and 64 places for processes are free. Fix: 66 at most" in error
        assert tandem(["scale", "decode", "1", *config]) == 0
        assert "decode-1" not in {process.name for process in run.state().processes}
        assert tandem(["scale", "decode", "65", "--dry-run", *config]) == 0
        assert tandem(["restart", "--rolling", "prefill", *config]) == 0
        assert run.state().processes[-1].name == "prefill-1"
        assert tandem(["status", *config]) == 0

        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(60) == 0, run.output.read_text()
        assert "num_left_over=0" in run.output.read_text()
        assert find_processes(state.run_id) == []
        assert not ray_folder(state.run_id).exists()
        assert run.run_dir.read_state() is None
        assert run.run_dir.read_secret() == ""


def test_nothing_survives_a_killed_controller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_run(tmp_path) as run:
        state = run.state()
        run.process.kill()
        run.process.wait()
        pids = [process.pid for process in state.processes]
        wait_until(lambda: not any(is_alive(pid) for pid in pids))

        assert tandem(["status", "--config", str(run.config_path)]) == 1
        assert "'fake' is not running" in capsys.readouterr().err
        assert tandem(["down", "--config", str(run.config_path)]) == 0
        assert find_processes(state.run_id) == []
        assert not ray_folder(state.run_id).exists()
        assert run.run_dir.read_state() is None


def test_a_cluster_outlives_its_controller_and_the_next_one_takes_it_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_run(tmp_path, on_controller_loss="keep") as run:
        before = run.state()
        pids = {process.name: process.pid for process in before.processes}
        for number in (signal.SIGKILL, signal.SIGTERM):
            run.process.send_signal(number)
            run.process.wait(60)
            assert all(is_alive(pid) for pid in pids.values()), run.output.read_text()
            run.start()
            run.wait_ready()
            wait_until(lambda: run.output.read_text().count("took over") == len(pids))
            assert {p.name: p.pid for p in run.state().processes} == pids
            wait_until(lambda: all(p.phase is Phase.READY for p in run.state().processes))
            assert run.state().run_id == before.run_id
            assert run.state().started == before.started
        # What dies while nobody looks comes back with the next controller.
        run.process.kill()
        run.process.wait()
        os.kill(pids["decode-0"], signal.SIGKILL)
        run.start()
        run.wait_ready()
        wait_until(
            lambda: (
                {p.name: p.pid for p in run.state().processes}["decode-0"]
                not in (0, pids["decode-0"])
            )
        )
        wait_until(lambda: all(p.phase is Phase.READY for p in run.state().processes))
        assert {p.name: p.num_restarts for p in run.state().processes}["decode-0"] == 1

        assert tandem(["down", "--config", str(run.config_path)]) == 0
        assert run.process.wait(60) == 0, run.output.read_text()
        assert find_processes(before.run_id) == []
        assert not ray_folder(before.run_id).exists()
        assert run.run_dir.read_state() is None
        assert run.run_dir.read_secret() == ""


def test_what_outlived_its_controller_can_be_stopped_without_one(tmp_path: Path) -> None:
    with fake_run(tmp_path, on_controller_loss="keep") as run:
        run_id = run.state().run_id
        run.process.kill()
        run.process.wait()
        assert tandem(["down", "--config", str(run.config_path)]) == 0
        assert find_processes(run_id) == []
        assert run.run_dir.read_state() is None


@pytest.fixture(params=[True, False], ids=["token", "no-token"])
def others_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray that somebody else has started on this machine.

    Ray asks for a token where it finds one when it is started, which a user's home may well have.
    """
    home = Path(tempfile.mkdtemp(prefix="home-"))
    monkeypatch.setenv("HOME", str(home))
    if request.param:
        (home / ".ray").mkdir()
        (home / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    # Ray's sockets are below this folder, and their paths may not be long.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}"]
    command += ["--node-ip-address=127.0.0.1", f"--temp-dir={folder}", "--num-cpus=8"]
    command += ["--num-gpus=0", "--include-dashboard=false", "--disable-usage-stats"]
    marked = {**os.environ, "OTHERS_RAY": str(folder)}
    subprocess.run(command, env=marked, check=True, capture_output=True, timeout=120)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("OTHERS_RAY") == str(folder):
                    process.kill()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(home, ignore_errors=True)


def test_auto_joins_the_ray_of_this_machine_and_leaves_it_running(
    tmp_path: Path, others_ray: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", others_ray)
    with fake_run(tmp_path, ray_address="auto", network="127.0.0.0/8") as run:
        state = run.state()
        assert "gcs_server" not in {process.name() for process in find_processes(state.run_id)}
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(60) == 0, run.output.read_text()
        assert find_processes(state.run_id) == []
    assert is_reachable(others_ray)


def test_a_ray_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    cluster = dataclasses.replace(config.cluster, ray_address=address, network="127.0.0.0/8")
    run = FakeRun(tmp_path, dataclasses.replace(config, cluster=cluster))
    assert run.process.wait(60) == 1
    (told,) = [line for line in run.output.read_text().splitlines() if line.startswith("error: ")]
    assert f"cluster.ray_address = '{address}': no Ray answers there" in told
    assert "ray start --head" in told
