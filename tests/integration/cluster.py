"""A cluster of real processes for tests: router, prefill and decode ranks, killed at will.

What ``tandem up`` does with Ray, in a hundred lines without it, so that a test can kill any process
at any moment and look at what is left. Every process carries ``TANDEM_TEST_CLUSTER`` in its
environment: a leaked process is found by it, whoever its parent is. Those of the cluster itself are
forked from one that has imported them (`tests.processes`), but on GPUs, whose libraries want a
process that nobody has been before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from deploy.devices import NO_MULTICAST, rotate, visible_devices
from deploy.ports import free_port, free_ports
from runtime.config import ClusterConfig
from runtime.config.file import dump_config
from runtime.net.credentials import Credentials
from tests.processes.forked import Process, start
from tests.waiting import wait_until

MARK = "TANDEM_TEST_CLUSTER"
START_TIMEOUT_S = 300.0
NO_DRAFTS = 0
"""`decode.num_speculative_tokens` of clusters whose steps, rows or experts' tokens are counted:
with a checkpoint that has the layer for them a cluster has a draft by default."""


class Cluster:
    """One running cluster; use it as a context manager.

    Ranks on GPUs take them in order and, if there are fewer than ranks, again.
    """

    def __init__(
        self,
        config: ClusterConfig,
        folder: Path,
        *,
        num_devices: int = 0,
        start_timeout_s: float = START_TIMEOUT_S,
        modules: Mapping[str, str] | None = None,
        grace_s: float | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            config: ports are chosen here.
            folder: for logs and the configuration.
            num_devices: GPUs of this host.
            start_timeout_s: how long the start may take.
            modules: run in the place of a role's own, by role.
            grace_s: `--grace` of the workers; None for their own.
        """
        number = config.router.instances
        router = dataclasses.replace(
            config.router,
            port=free_ports("127.0.0.1", number),
            control_port=free_ports("127.0.0.1", number),
        )
        self.config = dataclasses.replace(config, router=router)
        self.processes: dict[str, Process] = {}
        self._started: list[Process] = []
        self._folder = folder
        self._num_devices = num_devices
        self._start_timeout_s = start_timeout_s
        self._modules = dict(modules or {})
        self._grace = [] if grace_s is None else ["--grace", f"{grace_s:g}"]
        self._mark = secrets.token_hex(8)
        self._file = folder / "cluster.toml"
        self._environment = {
            **os.environ,
            MARK: self._mark,
            "TANDEM_SECRET": secrets.token_hex(16),
            "OMP_NUM_THREADS": "1",
        }

    def address_of(self, name: str) -> str:
        """Where a process listens."""
        return "127.0.0.1"

    def start_process(
        self, name: str, command: list[str], environment: Mapping[str, str], log: BinaryIO
    ) -> Process:
        """Start the process that runs `command`, a module and its arguments."""
        return start(command, environment=environment, output=log, fresh=self._num_devices > 0)

    @property
    def control_address(self) -> str:
        """Of the routers' registries, with commas between."""
        host, first = self.address_of("router"), self.config.router.control_port
        return ",".join(f"{host}:{first + n}" for n in range(self.config.router.instances))

    @property
    def credentials(self) -> Credentials:
        """Of all its processes."""
        return Credentials.of_secret(self._environment["TANDEM_SECRET"])

    @property
    def base_url(self) -> str:
        """Of the first router's HTTP."""
        return self.base_urls[0]

    @property
    def base_urls(self) -> list[str]:
        """Of all routers."""
        host, first = self.address_of("router"), self.config.router.port
        return [f"http://{host}:{first + n}" for n in range(self.config.router.instances)]

    def __enter__(self) -> Cluster:
        self.write_config()
        try:
            for index in range(self.config.router.instances):
                self.start_router(index)
            for index in range(self.config.prefill.instances):
                self.start_instance("prefill", index)
            for index in range(self.config.decode.instances):
                self.start_instance("decode", index)
            wait_until(self._is_ready, "the cluster is ready", self._start_timeout_s)
        except BaseException:
            self.kill_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def write_config(self) -> None:
        """For all of its processes; entering does it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file.write_text(dump_config(_served_at(self.address_of("router"), self.config)))

    def start_router(self, index: int) -> None:
        """Start one of the routers."""
        command = ["router", "--config", str(self._file), "--index", str(index)]
        self._start(f"router-{index}" if index else "router", command)

    def start_instance(self, role: str, index: int) -> None:
        """Start all ranks of one instance."""
        section = self.config.prefill if role == "prefill" else self.config.decode
        rendezvous = f"127.0.0.1:{free_port('127.0.0.1')}"
        for rank in range(section.num_ranks):
            module = self._modules.get(role, role)
            command = [module, "--config", str(self._file), "--instance", f"{role}-{index}"]
            command += ["--rank", str(rank), "--rendezvous", rendezvous]
            command += ["--router", self.control_address, *self._grace]
            self._start(f"{role}-{index}/{rank}", command, self._devices_of(role, index, rank))

    def _devices_of(self, role: str, index: int, rank: int) -> dict[str, str]:
        """All devices for every rank, as memory of one opens in another; rank r takes number r.

        If there are fewer than ranks, each sees its own alone: workers refuse to share otherwise.
        """
        prefill, decode = self.config.prefill, self.config.decode
        section = prefill if role == "prefill" else decode
        if section.device == "cpu":
            return {}
        before = index * prefill.num_ranks
        if role == "decode":
            on_devices = prefill.instances * prefill.num_ranks if prefill.device == "cuda" else 0
            before = on_devices + index * decode.dp
        names = visible_devices(os.environ, self._num_devices)
        order = rotate(names, before % self._num_devices)
        if section.num_ranks > self._num_devices:
            order = [order[rank % self._num_devices]]
        return {**NO_MULTICAST, "CUDA_VISIBLE_DEVICES": ",".join(order)}

    def _start(
        self, name: str, command: list[str], environment: Mapping[str, str] | None = None
    ) -> None:
        with (self._folder / f"{name.replace('/', '-')}.log").open("ab") as log:
            variables = {**self._environment, **(environment or {})}
            self.processes[name] = self.start_process(name, command, variables, log)
        self._started.append(self.processes[name])

    def _is_ready(self) -> bool:
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise AssertionError(f"{name} exited {process.returncode}:\n{self.log_tail(name)}")
        sections = (self.config.prefill, self.config.decode)
        expected = sum(section.instances * section.num_endpoints for section in sections)
        statuses = [self.status(url) for url in self.base_urls]
        return all(s is not None and len(s["workers"]) >= expected for s in statuses)

    def log_tail(self, name: str, num_bytes: int = 4000) -> str:
        """The end of a process's output."""
        path = self._folder / f"{name.replace('/', '-')}.log"
        return path.read_bytes()[-num_bytes:].decode(errors="replace")

    def status(self, base_url: str = "") -> dict[str, Any] | None:
        """The ``/status`` of the first router, or of another; None while it does not answer."""
        url = f"{base_url or self.base_url}/status"
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except (urllib.error.URLError, OSError):
            return None

    def kill(self, name: str) -> None:
        """SIGKILL one process, at once and for real."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(60)

    def terminate(self, instance: str, timeout_s: float = 60.0) -> None:
        """SIGTERM all ranks of an instance, and wait until each has ended in order."""
        names = [name for name in self.processes if name.startswith(f"{instance}/")]
        for name in names:
            self.processes[name].send_signal(signal.SIGTERM)
        for name in names:
            status = self.processes.pop(name).wait(timeout_s)
            assert status == 0, f"{name} exited {status}:\n{self.log_tail(name)}"

    def wait_workers(self, count: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until exactly ``count`` ranks are registered, none of them a dead one's lease."""

        def registered() -> bool:
            status = self.status() or {"workers": []}
            pids = {worker["pid"] for worker in status["workers"]}
            alive = {process.pid for process in self.processes.values()}
            return len(status["workers"]) == count and pids <= alive

        wait_until(registered, f"{count} workers are registered", timeout_s)

    def wait_exit(self, name: str, timeout_s: float = 60.0) -> None:
        """Wait until a process ends by itself, which must not look like success."""
        process = self.processes.pop(name)
        assert process.wait(timeout_s) != 0, f"{name} exited 0:\n{self.log_tail(name)}"

    def metric(self, instance: str, name: str, *, rank: int | None = None) -> float:
        """The sum of a metric's samples over the ranks of ``instance``, or of one of them."""
        status = self.status()
        assert status is not None
        total = 0.0
        for worker in status["workers"]:
            if worker["instance"] == instance and rank in (None, worker["rank"]):
                url = f"http://{worker['metrics_address']}/metrics"
                with urllib.request.urlopen(url, timeout=60) as response:
                    total += _sum_samples(response.read().decode(), name)
        return total

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until no request is anywhere and every pool has all its blocks back."""
        wait_until(lambda: not self.busy(), "every pool is back to zero", timeout_s)

    def busy(self) -> list[str]:
        """What is not back to zero, one line each."""
        status = self.status()
        return ["the router does not answer"] if status is None else _busy_lines(status)

    def stop(self) -> None:
        """SIGTERM everything, then check that all ended by themselves and nothing is left."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        late = []
        for name, process in self.processes.items():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                late.append(name)
        tails = {name: self.log_tail(name) for name in late}
        self.kill_all()
        assert not late, f"did not end on SIGTERM: {tails}"

    def kill_all(self) -> None:
        """SIGKILL whatever carries our mark."""
        for pid in self.marked_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait(60)

    def marked_processes(self) -> list[int]:
        """The pids of all living processes that descend from this cluster."""
        started = {process.pid for process in self._started if process.poll() is None}
        return sorted({*_marked(f"{MARK}={self._mark}".encode()), *started})


def _busy_lines(status: Mapping[str, Any]) -> list[str]:
    lines = []
    if status["num_requests_in_flight"]:
        lines.append(f"router in_flight={status['num_requests_in_flight']}")
    for worker in status["workers"]:
        load = worker["load"]
        held = load["num_total_blocks"] - load["num_free_blocks"]
        counts = {
            "running": load["num_requests_running"],
            "waiting": load["num_requests_waiting"],
            "quarantined": load["num_quarantined_blocks"],
            "held": held,
        }
        if any(counts.values()):
            lines.append(f"{worker['instance']}/{worker['rank']} {counts}")
    return lines


def _sum_samples(text: str, name: str) -> float:
    """Of a metric, or of one sample: its name with labels, which have no spaces."""
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    lines = [line for line in samples if name in (line.split(" ")[0], line.split("{")[0])]
    assert lines, f"no metric {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _marked(mark: bytes) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state != "Z" and mark in environment.split(b"\0"):
            yield int(entry.name)


def _served_at(host: str, config: ClusterConfig) -> ClusterConfig:
    """``config`` at ``host``; on a cable of its own nobody but the test gets to the router."""
    cluster = dataclasses.replace(config.cluster, host=host)
    router = dataclasses.replace(config.router, allow_anonymous=not config.router.keys_file)
    return dataclasses.replace(config, cluster=cluster, router=router)
