"""Addresses of pods: a bridge in a namespace of its own, and a pair of interfaces for each pod.

All of it lives as long as the processes that hold the namespaces, which die with the thread that
starts them; so nothing is left behind, however a test ends.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
from pathlib import Path

from runtime.process import dying_with_us

NODE = 1
"""The last number of the node's address, at which names are looked up."""
_FIRST_POD = 10
_FIRST_SERVICE = 200


class Held:
    """A process that does nothing but hold namespaces open."""

    def __init__(self, *namespaces: str) -> None:
        command = ("unshare", *namespaces, "--", "sh", "-c", "echo; exec sleep infinity")
        self._process = subprocess.Popen(dying_with_us(command), stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # the namespaces are there

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def close(self) -> None:
        """Let the namespaces go."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class PodNetwork:
    """A network of at most some 190 pods, which this machine can reach."""

    def __init__(self) -> None:
        """Choose addresses that nobody here has."""
        self.network = _free_network()
        self._name = f"tp{os.getpid() % 10**6}x{int(self.network.network_address) >> 8 & 255}"
        self._held = Held("--net")
        self._next_pod = _FIRST_POD
        self._next_service = _FIRST_SERVICE
        self._on_node("ip", "link", "add", "pods", "type", "bridge")
        _run("ip", "link", "add", self._name, "type", "veth", "peer", "name", "uplink")
        _run("ip", "link", "set", "uplink", "netns", str(self._held.pid))
        self._on_node("ip", "link", "set", "uplink", "master", "pods", "up")
        self._on_node("ip", "link", "set", "pods", "up")
        _run("ip", "addr", "add", f"{self.node}/{self.network.prefixlen}", "dev", self._name)
        _run("ip", "link", "set", self._name, "up")

    @property
    def node(self) -> str:
        """Of the node."""
        return self._address(NODE)

    def add_service(self) -> str:
        """An address of the node's for a Service."""
        address = self._address(self._next_service)
        self._next_service += 1
        _run("ip", "addr", "add", f"{address}/32", "dev", self._name)
        return address

    def add_pod(self) -> tuple[str, Held]:
        """A new pod's address, and what holds its network."""
        address = self._address(self._next_pod)
        self._next_pod += 1
        assert self._next_pod < _FIRST_SERVICE, "more pods than addresses"
        held, outside = Held("--net"), f"pod{self._next_pod}"
        pid = str(held.pid)
        self._on_node("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0")
        self._on_node("ip", "link", "set", "eth0", "netns", pid)
        self._on_node("ip", "link", "set", outside, "master", "pods", "up")
        inside = ("nsenter", "-t", pid, "--net", "ip")
        length = self.network.prefixlen
        _run(*inside, "addr", "add", f"{address}/{length}", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "link", "set", "lo", "up")
        return address, held

    def close(self) -> None:
        """Let all addresses go."""
        subprocess.run(["ip", "link", "del", self._name], check=False, capture_output=True)
        self._held.close()

    def _address(self, number: int) -> str:
        return str(self.network.network_address + number)

    def _on_node(self, *command: str) -> None:
        _run("nsenter", "-t", str(self._held.pid), "--net", *command)


def why_not() -> str:
    """Why pods cannot be run here; empty: they can."""
    if os.geteuid() != 0:
        return "needs root: namespaces, mounts and virtual interfaces"
    for tool in ("ip", "nsenter", "unshare"):
        if not any(
            (Path(folder) / tool).exists()
            for folder in [*os.defpath.split(":"), "/usr/sbin", "/sbin"]
        ):
            return f"needs {tool} (iproute2, util-linux)"
    probe = ("unshare", "--net", "--mount", "--pid", "--fork", "--", "sh", "-c")
    links = "ip link add name t0 type veth peer name t1 && ip link add name t2 type bridge"
    script = f"{links} && mount -t tmpfs x /mnt"
    result = subprocess.run([*probe, script], capture_output=True, text=True, check=False)
    return f"namespaces cannot be made: {result.stderr.strip()}" if result.returncode else ""


def _free_network() -> ipaddress.IPv4Network:
    shown = subprocess.run(
        ["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True
    ).stdout
    taken = [ipaddress.ip_interface(line.split()[3]).network for line in shown.splitlines() if line]
    for number in range(256):
        mixed = (number + os.getpid()) % 256
        network = ipaddress.IPv4Network(f"10.213.{mixed}.0/24")
        if not any(network.overlaps(other) for other in taken):
            return network
    raise AssertionError("no free network in 10.213.0.0/16")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
