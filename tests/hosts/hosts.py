"""Hosts to test on: network namespaces of this machine on a bridge, each with its own address.

A host can be cut off, have a bad cable, be killed as a power cut does it, and come back. They share
this machine's processes, files and clock, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.integration.churn import why_no_network

ROOT = Path(__file__).resolve().parents[2]
MARK = "TANDEM_TEST_HOSTS"


def why_no_hosts() -> str:
    """Why no hosts can be made here; empty where they can."""
    return why_no_network()


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One namespace."""

    name: str
    namespace: str
    address: str
    outside: str
    """The end of its link that is not in the namespace."""


class Hosts:
    """A bridge, and a host for each of ``names``; use it as a context manager."""

    def __init__(self, names: Sequence[str]) -> None:
        self.token = secrets.token_hex(2)
        # Of all subnets of 10.64.0.0/10 one that no other process of tests has now, very likely.
        drawn = secrets.randbelow(2**14)
        self.network = f"10.{64 + drawn // 256}.{drawn % 256}.0/24"
        base = self.network.rpartition(".")[0]
        self.own_address = f"{base}.254"
        self._bridge = f"br{self.token}"
        self.environment = {**os.environ, MARK: self.token, "PYTHONPATH": str(ROOT)}
        """Of what runs on them."""
        self._cables: dict[str, subprocess.Popen[bytes]] = {}
        self.hosts = {
            name: Host(
                name=name,
                namespace=f"th{self.token}-{name}",
                address=f"{base}.{index + 1}",
                outside=f"v{self.token}{name}",
            )
            for index, name in enumerate(names)
        }

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __enter__(self) -> Hosts:
        _ip(f"link add {self._bridge} type bridge")
        _ip(f"addr add {self.own_address}/24 dev {self._bridge}")
        _ip(f"link set {self._bridge} up")
        for host in self.hosts.values():
            self._name_hosts(host)
            _ip(f"netns add {host.namespace}")
            _ip(f"link add {host.outside} type veth peer name eth0 netns {host.namespace}")
            _ip(f"-n {host.namespace} addr add {host.address}/24 dev eth0")
            for device in ("lo", "eth0"):
                _ip(f"-n {host.namespace} link set {device} up")
            # Else nothing has a way to addresses that are far away, as a usual host has.
            _ip(f"-n {host.namespace} route add default via {self.own_address}")
            _ip(f"link set {host.outside} master {self._bridge} up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._cables):
            self.mend(name)
        for host in self.hosts.values():
            self.end_processes(host.name)
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(f"netns del {host.namespace}")
            shutil.rmtree(_own_etc(host), ignore_errors=True)
        _ip(f"link del {self._bridge}")

    def command(self, name: str, *words: str) -> list[str]:
        """A command line that runs ``words`` on a host."""
        return ["ip", "netns", "exec", self[name].namespace, *words]

    def run(
        self,
        name: str,
        *words: str,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host; its output is both of its streams."""
        return subprocess.run(
            self.command(name, *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**self.environment, **(environment or {})},
            cwd=ROOT,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def cut(self, name: str) -> None:
        """No packet reaches the host or leaves it."""
        _ip(f"link set {self[name].outside} down")

    def rejoin(self, name: str) -> None:
        """Undo ``cut``."""
        _ip(f"link set {self[name].outside} up")

    def kill(self, name: str) -> None:
        """As a power cut: nobody hears of it, and nothing of the host is left."""
        self.cut(name)
        self.end_processes(name)

    def end_processes(self, name: str) -> None:
        """Kill all that runs on a host."""
        deadline = time.monotonic() + 30
        while pids := self._pids(name):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, f"host {name} does not die"
            time.sleep(0.05)

    def impair(
        self, name: str, *, delay_s: float = 0.0, loss: float = 0.0, rate: float = 0.0
    ) -> None:
        """Give a host a bad cable, both ways; see ``cable``."""
        host = self[name]
        inner, outer = f"w{self.token}{name}", f"x{self.token}{name}"
        _ip(f"link add {inner} type veth peer name {outer}")
        _ip(f"link set {host.outside} nomaster")
        _ip(f"link set {inner} master {self._bridge} up")
        _ip(f"link set {outer} up")
        command = [sys.executable, "-m", "tests.hosts.cable", host.outside, outer]
        command += ["--delay", str(delay_s), "--loss", str(loss), "--rate", str(rate)]
        self._cables[name] = subprocess.Popen(command, cwd=ROOT, env=self.environment)

    def mend(self, name: str) -> None:
        """Undo ``impair``."""
        cable = self._cables.pop(name)
        cable.kill()
        cable.wait()
        _ip(f"link del w{self.token}{name}")
        _ip(f"link set {self[name].outside} master {self._bridge}")

    def _name_hosts(self, host: Host) -> None:
        """Give all addresses names: torch looks for one, and no name server is in reach.

        It asks from a socket of IPv6, which has IPv4 addresses in a form of its own.
        """
        folder = _own_etc(host)
        folder.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        names = {one.address: f"host-{one.name}" for one in self.hosts.values()}
        for address, name in {**names, self.own_address: "outside"}.items():
            lines += [f"{address} {name}", f"::ffff:{address} {name}"]
        (folder / "hosts").write_text("\n".join([*lines, ""]))

    def _pids(self, name: str) -> list[int]:
        found = subprocess.run(
            ["ip", "netns", "pids", self[name].namespace],
            capture_output=True,
            text=True,
            check=False,
        )
        return [int(word) for word in found.stdout.split()]


def _own_etc(host: Host) -> Path:
    """What `ip netns exec` lays over /etc."""
    return Path("/etc/netns") / host.namespace


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)
