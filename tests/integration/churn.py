"""What keeps happening to a cluster in a bad hour: workers killed, the network cut. Counted.

The router lives in a network namespace of its own where we are root, so that a cut is a cut: the
link to all workers is down, nothing is refused, packets are lost.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import BinaryIO

from tests.integration.background import Background
from tests.integration.cluster import Cluster
from tests.processes.forked import Process, execute


def why_no_network() -> str:
    """Why no network namespace can be made here; empty where one can."""
    if os.geteuid() != 0:
        return "not root"
    if shutil.which("ip") is None:
        return "no ip command (package iproute2)"
    name = f"tandem-probe-{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces are not allowed here"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Link:
    """A namespace for the router, and the one link between it and everything else."""

    def __init__(self) -> None:
        # A subnet that no other process of tests has now, very likely.
        subnet = f"10.77.{secrets.randbelow(256)}.{4 * secrets.randbelow(64)}"
        base, _, first = subnet.rpartition(".")
        self.worker_address = f"{base}.{int(first) + 1}"
        self.router_address = f"{base}.{int(first) + 2}"
        token = secrets.token_hex(3)
        self.namespace = f"tandem-{token}"
        self._ours, self._theirs = f"ta{token}", f"tb{token}"

    def __enter__(self) -> Link:
        _ip(f"netns add {self.namespace}")
        _ip(f"link add {self._ours} type veth peer name {self._theirs}")
        _ip(f"link set {self._theirs} netns {self.namespace}")
        _ip(f"addr add {self.worker_address}/30 dev {self._ours}")
        _ip(f"-n {self.namespace} addr add {self.router_address}/30 dev {self._theirs}")
        _ip(f"-n {self.namespace} link set lo up")
        _ip(f"-n {self.namespace} link set {self._theirs} up")
        _ip(f"link set {self._ours} up")
        return self

    def __exit__(self, *_: object) -> None:
        _ip(f"netns del {self.namespace}")
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip(f"link del {self._ours}")  # gone with its other end, as a rule

    def cut(self, seconds: float) -> None:
        """No packet passes for so long."""
        _ip(f"link set {self._ours} down")
        try:
            time.sleep(seconds)
        finally:
            _ip(f"link set {self._ours} up")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


class LinkedCluster(Cluster):
    """A cluster whose router is behind a link."""

    link: Link | None = None

    def address_of(self, name: str) -> str:
        """Where a process listens."""
        if self.link is None:
            return "127.0.0.1"
        return self.link.router_address if name == "router" else self.link.worker_address

    def start_process(
        self, name: str, command: list[str], environment: Mapping[str, str], log: BinaryIO
    ) -> Process:
        """Start a process on its side of the link."""
        if self.link is not None and name == "router":
            inside = ["ip", "netns", "exec", self.link.namespace, sys.executable, "-m", *command]
            return execute(inside, environment=environment, output=log)
        if self.link is not None:
            command = [*command, "--host", self.link.worker_address]
        return super().start_process(name, command, environment, log)


class Churn(Background):
    """Kills and cuts until told to stop, from a thread of its own."""

    def __init__(
        self,
        cluster: Cluster,
        link: Link | None,
        *,
        decode_every_s: float,
        prefill_every_s: float,
        cut_every_s: float,
        cut_s: float = 2.0,
        seed: int = 31,
        spared: Collection[str] = (),
    ) -> None:
        super().__init__("churn")
        self.counts: Counter[str] = Counter()
        self._cluster = cluster
        self._draw = random.Random(seed)
        self._spared = frozenset(spared)
        plan: list[tuple[str, float, Callable[[], None]]] = [
            ("decode killed", decode_every_s, lambda: self._restart("decode")),
            ("prefill killed", prefill_every_s, lambda: self._restart("prefill")),
        ]
        if link is not None:
            plan.append(("network cut", cut_every_s, lambda: link.cut(cut_s)))
        self._plan = plan

    def _run(self) -> None:
        begun = time.monotonic()
        due = [(begun + every_s, index) for index, (_, every_s, _) in enumerate(self._plan)]
        while due:
            at, index = min(due)
            if self._stop.wait(max(0.0, at - time.monotonic())):
                return
            name, every_s, act = self._plan[index]
            act()
            self.counts[name] += 1
            due.remove((at, index))
            due.append((time.monotonic() + every_s, index))

    def _restart(self, role: str) -> None:
        """Kill one instance of the role, if another one is there to go on."""
        section = self._cluster.config.prefill if role == "prefill" else self._cluster.config.decode
        alive = {str(w["instance"]) for w in self._workers() if w["role"] == role}
        if len(alive) < section.instances:
            return
        victim = self._draw.choice(sorted(alive - self._spared))
        names = [name for name in self._cluster.processes if name.startswith(f"{victim}/")]
        for name in names:
            self._cluster.kill(name)
        self._cluster.start_instance(role, int(victim.rpartition("-")[2]))

    def _workers(self) -> list[dict[str, object]]:
        status = self._cluster.status()
        return [] if status is None else list(status["workers"])


@contextlib.contextmanager
def linked_cluster(cluster: LinkedCluster) -> Iterator[Link | None]:
    """Start the cluster, its router behind a link where that can be made."""
    if why_no_network():
        with cluster:
            yield None
        return
    with Link() as link:
        cluster.link = link
        with cluster:
            yield link
