"""A Ray over hosts, and a Tandem cluster in it, as a person starts them by hand."""

from __future__ import annotations

import contextlib
import json
import shutil
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.hosts.hosts import Hosts
from tests.waiting import wait_until

RAY_PORT = 6379
NUM_TRIES = 3
"""Of `ray start`, which gives up after 30 s; a machine that does much else may need longer."""
TOKEN = "a token of tests, long enough for nobody to guess it"
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    # A lost host is known as lost after some 8 s, as docs/use/multi-node.md advises.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_memory_monitor_refresh_ms": "0",
    "TANDEM_SECRET": "",
}


@contextlib.contextmanager
def serving(
    hosts: Hosts,
    folder: Path,
    num_cpus: Mapping[str, int],
    *,
    sections: str = "",
    cluster: str = "",
    has_tls: bool = False,
) -> Iterator[HostedCluster]:
    """A cluster that serves: Ray on each host of ``num_cpus``, the head first, then ``up``."""
    hosted = HostedCluster(hosts, folder, has_tls=has_tls)
    try:
        for host, count in num_cpus.items():
            hosted.start_ray(host, count)
        hosted.configure(sections, cluster)
        hosted.up()
        yield hosted
    finally:
        hosted.clean_up()


class HostedCluster:
    """A cluster whose head, controller and router are on host "a"."""

    def __init__(
        self, hosts: Hosts, folder: Path, name: str = "hosted", *, has_tls: bool = False
    ) -> None:
        """``has_tls``: of its own making."""
        self.hosts = hosts
        self._has_tls = has_tls
        self.folder = folder
        self.name = name
        self.config_path = folder / f"{name}.toml"

    @property
    def ray_address(self) -> str:
        return f"{self.hosts['a'].address}:{RAY_PORT}"

    @property
    def base_url(self) -> str:
        scheme = "https" if self._has_tls else "http"
        return f"{scheme}://{self.hosts['a'].address}:8000"

    @property
    def ca(self) -> Path:
        """Of the authority of a cluster with TLS."""
        return self.folder / self.name / "tls" / "ca.pem"

    def start_ray(self, host: str, num_cpus: int) -> None:
        """``ray start`` on a host; the first one is the head."""
        place = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        if host != "a":
            place = [f"--address={self.ray_address}"]
        temporary = self._temporary(host)
        for _ in range(NUM_TRIES):
            shutil.rmtree(temporary, ignore_errors=True)
            result = self.hosts.run(
                host,
                *(sys.executable, "-m", "ray.scripts.scripts", "start", *place),
                *(f"--node-ip-address={self.hosts[host].address}", f"--num-cpus={num_cpus}"),
                *("--num-gpus=0", f"--temp-dir={temporary}", "--object-store-memory=80000000"),
                "--disable-usage-stats",
                environment=RAY_ENVIRONMENT,
            )
            if result.returncode == 0:
                return
            self.hosts.end_processes(host)
        raise AssertionError(result.stdout)

    def configure(self, sections: str, cluster: str = "") -> None:
        """Write the configuration: of a router that asks nobody on the hosts' network for a key."""
        opened = "[router]\nallow_anonymous = true\n"
        if "[router]\n" in sections:
            sections = sections.replace("[router]\n", opened)
        else:
            sections += opened
        self.config_path.write_text(
            f'[cluster]\nname = "{self.name}"\nrun_dir = "{self.folder}"\n'
            f'ray_address = "{self.ray_address}"\nnetwork = "{self.hosts.network}"\n{cluster}'
            f'[kv_transfer]\ntransport = "loopback"\n{sections}',
            encoding="utf-8",
        )

    def tandem(self, *words: str) -> Any:
        """A ``tandem`` command on host "a"."""
        command = [sys.executable, "-m", "deploy", *words]
        return self.hosts.run("a", *command, environment=RAY_ENVIRONMENT)

    def up(self) -> None:
        """``tandem up --detach``."""
        result = self.tandem("up", "--detach", str(self.config_path))
        assert result.returncode == 0, result.stdout + self.controller_log()

    def down(self) -> None:
        """``tandem down``."""
        result = self.tandem("down", "--config", str(self.config_path))
        assert result.returncode == 0, result.stdout

    def state(self) -> dict[str, Any]:
        """The controller's state file."""
        state: dict[str, Any] = json.loads((self.folder / self.name / "state.json").read_text())
        return state

    def processes(self) -> dict[str, dict[str, Any]]:
        """The processes of the state file by name."""
        return {process["name"]: process for process in self.state()["processes"]}

    def controller_log(self) -> str:
        """What the controller said."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / self.name / "logs" / "controller.log").read_text()
        return ""

    def status(self) -> dict[str, Any] | None:
        """The router's ``/status``; None while it does not answer."""
        try:
            context = ssl.create_default_context(cafile=str(self.ca)) if self._has_tls else None
            url = f"{self.base_url}/status"
            with urllib.request.urlopen(url, timeout=10, context=context) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except (urllib.error.URLError, OSError):
            return None

    def busy(self) -> list[str]:
        """What is not back to zero."""
        status = self.status()
        if status is None:
            return ["the router does not answer"]
        lines = [f"in flight {status['num_requests_in_flight']}"]
        lines = lines if status["num_requests_in_flight"] else []
        for worker in status["workers"]:
            load = worker["load"]
            held = load["num_total_blocks"] - load["num_free_blocks"]
            counts = (load["num_requests_running"], load["num_requests_waiting"], held)
            if any(counts):
                lines.append(f"{worker['instance']}/{worker['rank']} {counts}")
        return lines

    def wait_idle(self) -> None:
        """Wait until no request is anywhere and all pools are whole."""
        wait_until(lambda: not self.busy(), "every pool is back to zero", 90)

    def clean_up(self) -> None:
        """Remove what Ray left on the disk."""
        for host in self.hosts.hosts:
            shutil.rmtree(self._temporary(host), ignore_errors=True)

    def _temporary(self, host: str) -> Path:
        return Path("/tmp") / f"th-{self.hosts.token}-{host}"
