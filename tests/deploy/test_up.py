"""``tandem up`` for real: Ray, the real roles, the bundled model, what a person types."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.running.sweep import find_processes
from deploy.state import RunDir, run_dir_of
from runtime.config.file import load_config
from tests.deploy.fakes import ROOT
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = "def fibonacci(n):"

START_S = 180.0  # a worker starts in a few seconds, beside others' tests in many


class Cluster:
    """A configuration file and the ``tandem`` command on it."""

    def __init__(self, folder: Path, name: str, sections: str = "") -> None:
        self.config_path = folder / f"{name}.toml"
        self.config_path.write_text(
            f'[cluster]\nname = "{name}"\nrun_dir = "{folder}"\n'
            f"[router]\nport = 0\ncontrol_port = 0\n{sections}",
            encoding="utf-8",
        )
        self.run_dir: RunDir = run_dir_of(name, str(folder))

    def tandem(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "deploy", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    def command(self, *arguments: str) -> str:
        """The output of a command that must succeed on this cluster."""
        result = self.tandem(*arguments, "--config", str(self.config_path))
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def process(self, name: str) -> dict[str, Any]:
        result = self.tandem("status", "--json", "--config", str(self.config_path))
        processes = json.loads(result.stdout)["processes"]
        (process,) = [entry for entry in processes if entry["name"] == name]
        return dict(process)

    def generate(self) -> str:
        return self.command("generate", PROMPT, "--max-tokens", "24")

    @property
    def run_id(self) -> str:
        state = self.run_dir.read_state()
        assert state is not None
        return state.run_id


@pytest.fixture(scope="module")
def detached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, str]]:
    """A running cluster of one rank per role, and what ``tandem up`` printed."""
    cluster = Cluster(tmp_path_factory.mktemp("detached"), "detached")
    settings = ("--set", "model.name=renamed", "--set", "decode.max_num_seqs=7")
    result = cluster.tandem("up", "--detach", str(cluster.config_path), *settings)
    assert result.returncode == 0, result.stdout + result.stderr
    yield cluster, result.stdout
    run_id = cluster.run_id
    cluster.command("down")
    assert find_processes(run_id) == []


def listening(run_id: str) -> dict[str, list[str]]:
    """The addresses on which the processes of a run listen, Ray's own included, by process."""
    found: dict[str, list[str]] = {}
    for process in find_processes(run_id):
        connections = process.net_connections(kind="tcp")
        ends = [one.laddr for one in connections if one.status == psutil.CONN_LISTEN]
        found[f"{process.name()} {process.pid}"] = [end.ip for end in ends]
    return found


@pytest.mark.nightly
def test_a_cluster_speaks_tls_and_listens_on_the_loopback_interface_only(tmp_path: Path) -> None:
    sections = (
        'http_processes = 2\n[tls]\nmode = "auto"\nhttp_mutual = true\n'
        "[prefill]\ntp = 2\n[decode]\ndp = 2\n"
    )
    cluster = Cluster(tmp_path, "encrypted", sections)
    result = cluster.tandem("up", "--detach", str(cluster.config_path))
    assert result.returncode == 0, result.stdout + result.stderr
    run_id = cluster.run_id
    try:
        assert "https://127.0.0.1:" in result.stdout
        assert cluster.generate().startswith(PROMPT)
        assert cluster.process("decode-0/1")["load"] is not None
        assert (cluster.run_dir.tls_dir / "key.pem").exists()
        hosts = {name: set(ends) for name, ends in listening(run_id).items() if ends}
        assert len(hosts) > 8  # the roles' seven processes, and Ray's
        assert all(ends <= {"127.0.0.1", "::ffff:127.0.0.1"} for ends in hosts.values()), hosts
    finally:
        cluster.command("down")
    assert find_processes(run_id) == []
    assert not cluster.run_dir.tls_dir.exists()


def test_up_tells_progress_the_endpoint_and_a_curl_line_that_works(
    detached: tuple[Cluster, str],
) -> None:
    _, output = detached
    for name in ("router", "prefill-0", "decode-0"):
        assert f"] {name:<12} starting" in output
        assert f"] {name:<12} ready" in output
    (curl,) = [line for line in output.splitlines() if line.strip().startswith("curl ")]
    words = shlex.split(curl)
    if shutil.which("curl"):
        words.append("--silent")
    else:  # The same request without curl.
        url, body = words[1], words[words.index("-d") + 1]
        code = (
            "import sys, urllib.request as r; u, b = sys.argv[1:]; h = "
            "{'Content-Type': 'application/json'}; "
            "print(r.urlopen(r.Request(u, b.encode(), h)).read().decode())"
        )
        words = [sys.executable, "-c", code, url, body]
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    answer = json.loads(result.stdout)
    assert answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] <= 64


def test_what_up_prints_works_wherever_the_run_directory_is(
    detached: tuple[Cluster, str],
) -> None:
    cluster, output = detached
    (line,) = [line for line in output.splitlines() if " generate " in line]
    words = shlex.split(line)
    arguments = words[words.index("generate") :]
    choice = [] if "--name" in arguments else ["--name", "detached"]  # others may run meanwhile
    result = cluster.tandem(*arguments, *choice)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("def fibonacci(n):")
    result = cluster.tandem("logs", "decode-0", "--lines", "1000", "--name", "detached")
    assert result.returncode == 0, result.stderr
    assert " INFO decode-0/0 worker.host: ready " in result.stdout
    assert "down" in output


def test_fields_of_the_command_line_count_over_the_file(detached: tuple[Cluster, str]) -> None:
    cluster, _ = detached
    config = load_config(cluster.run_dir.config_path)
    assert config.model.name == "renamed"
    assert config.decode.max_num_seqs == 7


def test_generate_goes_on_with_the_prompt(detached: tuple[Cluster, str]) -> None:
    cluster, _ = detached
    text = cluster.generate()
    assert text.startswith(PROMPT)
    assert len(text) > len(PROMPT) + 1
    refused = cluster.tandem(
        "generate", PROMPT, "--max-tokens", "0", "--config", str(cluster.config_path)
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ")
    assert "max_tokens" in refused.stderr


def test_status_shows_load_and_memory(detached: tuple[Cluster, str]) -> None:
    cluster, _ = detached
    wait_until(lambda: cluster.process("decode-0")["load"] is not None, timeout_s=START_S)
    decode = cluster.process("decode-0")
    assert decode["memory_bytes"] > 50e6
    assert decode["load"]["num_total_blocks"] > 0
    status = cluster.tandem("status", "--json", "--name", "detached")
    assert json.loads(status.stdout)["recent"]["window_s"] > 0
    text = cluster.command("status")
    assert "detached ready" in text
    assert "prefill-0" in text


def test_a_second_run_of_that_name_is_refused(detached: tuple[Cluster, str]) -> None:
    cluster, _ = detached
    refused = cluster.tandem("up", str(cluster.config_path))
    assert refused.returncode == 1
    assert "'detached' is already running at http://127.0.0.1:" in refused.stderr
    cluster.generate()


def test_a_killed_decode_worker_comes_back_and_serves(detached: tuple[Cluster, str]) -> None:
    cluster, _ = detached
    before = cluster.generate()
    pid = cluster.process("decode-0")["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: cluster.process("decode-0")["pid"] not in (0, pid), timeout_s=START_S)
    wait_until(lambda: cluster.process("decode-0")["phase"] == "ready", timeout_s=START_S)
    assert cluster.process("decode-0")["num_restarts"] == 1
    assert cluster.process("prefill-0")["num_restarts"] == 0
    assert cluster.generate() == before


def kill_one_rank_of_two(cluster: Cluster) -> None:
    """Kill decode rank 1 for real, and wait until both ranks of the group live anew."""
    names = ("decode-0/0", "decode-0/1")
    pids = {cluster.process(name)["pid"] for name in names}
    os.kill(cluster.process(names[1])["pid"], signal.SIGKILL)
    wait_until(
        lambda: all(cluster.process(name)["pid"] not in (0, *pids) for name in names),
        timeout_s=START_S,
    )
    wait_until(
        lambda: all(cluster.process(name)["phase"] == "ready" for name in names), timeout_s=START_S
    )
    assert [cluster.process(name)["num_restarts"] for name in names] == [1, 1]


@pytest.mark.nightly
def test_parallel_ranks_come_back_together_and_ctrl_c_leaves_nothing(
    detached: tuple[Cluster, str], tmp_path: Path
) -> None:
    expected = detached[0].generate()
    cluster = Cluster(tmp_path, "parallel", "[decode]\ndp = 2\n")
    command = [sys.executable, "-m", "deploy", "up", str(cluster.config_path)]
    with (tmp_path / "output").open("w+") as output:
        up = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            wait_until(
                lambda: "Ctrl-C" in (tmp_path / "output").read_text() or up.poll() is not None,
                timeout_s=START_S,
            )
            assert up.poll() is None, (tmp_path / "output").read_text()
            run_id = cluster.run_id
            assert cluster.generate() == expected
            kill_one_rank_of_two(cluster)
            assert cluster.generate() == expected
        finally:
            # As a terminal does it: to the whole foreground group.
            os.killpg(up.pid, signal.SIGINT)
            status = up.wait(180)
    assert status == 0, (tmp_path / "output").read_text()
    assert (tmp_path / "output").read_text().endswith("stopped\n")
    assert find_processes(run_id) == []


@pytest.mark.nightly
def test_a_worker_that_cannot_start_is_told_with_its_log(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "deploy" / "models" / "tandem-python", model)
    (model / "model.safetensors").write_bytes(b"no weights")
    cluster = Cluster(tmp_path, "broken", f'[model]\npath = "{model}"\n')
    result = cluster.tandem("up", "--detach", str(cluster.config_path))
    assert result.returncode == 1
    assert "ended with status" in result.stderr
    assert "model.safetensors" in result.stderr
    assert "Traceback" not in result.stderr
    assert cluster.run_dir.read_state() is None
