"""Which ranks of an instance live on this host, and the command line and ports of each.

For `tandem worker`, which is told its place by whoever starts it: a pod's manifest, or a person.
Pure but for what it asks of this machine: its GPUs, and the interface of an address.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from deploy.devices import count_devices, visible_devices
from deploy.plan import OWN_PYTHON, ProcessSpec, Role
from deploy.ports import listen_at
from deploy.running.rank_command import rank_command
from runtime.config import ClusterConfig, DecodeSection, PrefillSection
from runtime.config.file import secret_variables
from runtime.errors import ConfigError
from runtime.net.credentials import Credentials, Listen, is_loopback, join_address
from runtime.net.roles import Role as Callee
from runtime.net.router_names import parse_routers

METRICS_OFFSET = 100
DATA_OFFSET = 200
HEALTH_OFFSET = 300
RENDEZVOUS_OFFSET = 301
CALLS_OFFSET = 310
MAX_LOCAL_RANKS = 90
"""So that a host takes 400 ports: the next one on the same machine has the base behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPorts:
    """The ports of one host's ranks, all counted from ``base``."""

    base: int

    def __post_init__(self) -> None:
        most = 2**16 - CALLS_OFFSET - MAX_LOCAL_RANKS
        if not 1 <= self.base <= most:
            raise ConfigError("--port-base", self.base, "is no port", f"1 to {most}")

    def grpc(self, local_rank: int) -> int:
        """Of gRPC."""
        return self.base + local_rank

    def metrics(self, local_rank: int) -> int:
        """Of ``/metrics``, ``/health`` and ``/ready`` of one rank."""
        return self.base + METRICS_OFFSET + local_rank

    def data(self, local_rank: int) -> int:
        """Of KV."""
        return self.base + DATA_OFFSET + local_rank

    def calls(self, local_rank: int) -> int:
        """Of routers' short calls."""
        return self.base + CALLS_OFFSET + local_rank

    @property
    def health(self) -> int:
        """Of ``/health`` and ``/ready`` of all of them, if nobody says otherwise."""
        return self.base + HEALTH_OFFSET

    @property
    def rendezvous(self) -> int:
        """Where the ranks of an instance of one host meet, on 127.0.0.1."""
        return self.base + RENDEZVOUS_OFFSET


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """What the one who starts a host's ranks knows of them.

    Attributes:
        role: prefill or decode.
        instance: its name; the same on all of its hosts.
        host_index: which of them this is.
        num_hosts: how many there are.
        rendezvous: "host:port" of the first host where the ranks meet; unused with one host.
        routers: as ``--router`` of a rank.
        listen: the interface, and the address that others are told.
        ports: of this host.
        grace_s: how long each rank may drain.
    """

    role: Role
    instance: str
    host_index: int
    num_hosts: int
    rendezvous: str
    routers: str
    listen: Listen
    ports: HostPorts
    grace_s: float

    def __post_init__(self) -> None:
        try:
            parse_routers(self.routers)
        except ValueError as error:
            fix = "HOST:PORT of each router's control port, or dns+HOST:PORT"
            raise ConfigError("--routers", self.routers, str(error), fix) from error
        if self.num_hosts < 1:
            raise ConfigError("--hosts", self.num_hosts, "is no number of hosts", "1 or more")
        if not 0 <= self.host_index < self.num_hosts:
            problem = f"--hosts is {self.num_hosts}"
            fix = f"a number from 0 to {self.num_hosts - 1}"
            raise ConfigError("--host-index", self.host_index, problem, fix)
        if self.num_hosts > 1 and not self.rendezvous:
            problem = f"the ranks of {self.num_hosts} hosts must meet somewhere"
            fix = "HOST:PORT, an address of the first of them and a free port"
            raise ConfigError("--rendezvous", "", problem, fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank of this host."""

    rank: int
    """Within the instance."""
    spec: ProcessSpec
    metrics_address: str
    """Where it tells of its health from this host; empty of a rank that takes no requests."""


def section_of(config: ClusterConfig, role: Role) -> PrefillSection | DecodeSection:
    """The settings of a worker's role."""
    return config.prefill if role is Role.PREFILL else config.decode


def local_ranks(place: HostPlace, config: ClusterConfig) -> range:
    """The ranks of the instance that live on this host.

    Raises:
        ConfigError: they cannot be shared out evenly, or are too many.
    """
    section = section_of(config, place.role)
    count, rest = divmod(section.num_ranks, place.num_hosts)
    field = section.ranks_field
    if rest or not count:
        problem = f"{field} = {section.num_ranks} ranks are not the same number on each"
        fix = f"a divisor of {section.num_ranks}, or another {field}"
        raise ConfigError("--hosts", place.num_hosts, problem, fix)
    if place.role is Role.PREFILL and place.num_hosts > 1:
        problem = "the ranks of a prefill worker live on one host"
        raise ConfigError("--hosts", place.num_hosts, problem, "1")
    if count > MAX_LOCAL_RANKS:
        problem = f"{count} ranks a host, and {MAX_LOCAL_RANKS} have ports"
        raise ConfigError(field, section.num_ranks, problem, "more --hosts")
    return range(place.host_index * count, (place.host_index + 1) * count)


def plan_ranks(
    place: HostPlace, config: ClusterConfig, config_path: Path, credentials: Credentials
) -> tuple[RankPlan, ...]:
    """The ranks of this host; ``config_path`` is a file of ``config``.

    Raises:
        ConfigError: they do not fit, here or on their hosts.
    """
    ranks = local_ranks(place, config)
    section = section_of(config, place.role)
    devices = _devices(len(ranks), place) if section.device == "cuda" else ()
    threads = str(section.num_threads)
    common = {
        **secret_variables(credentials.of_role(Callee(place.role))),
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads),
        "PYTHONUNBUFFERED": "1",
    }
    network = _network(place)
    return tuple(
        RankPlan(
            rank=rank,
            spec=ProcessSpec(
                name=f"{place.instance}/{rank}",
                command=_command(place, rank, local, config_path),
                env={**common, "LOCAL_RANK": str(local), **(devices[local] if devices else {})},
                default_env=network,
                log_path="",
            ),
            metrics_address=_asked_at(place, local) if rank < section.num_endpoints else "",
        )
        for local, rank in enumerate(ranks)
    )


def _command(place: HostPlace, rank: int, local: int, config_path: Path) -> tuple[str, ...]:
    ports = place.ports
    alone = join_address("127.0.0.1", ports.rendezvous)
    command = rank_command(
        (OWN_PYTHON, "-m", place.role.value),
        config_path,
        instance=place.instance,
        rank=rank,
        grace_s=place.grace_s,
        rendezvous=place.rendezvous if place.num_hosts > 1 else alone,
        routers=place.routers,
        bind=place.listen.bind,
        advertise=place.listen.advertise,
    )
    return (
        *command,
        *("--port", str(ports.grpc(local))),
        *("--metrics-port", str(ports.metrics(local))),
        *("--data-port", str(ports.data(local))),
        *("--calls-port", str(ports.calls(local))),
    )


def _asked_at(place: HostPlace, local: int) -> str:
    """Where a rank answers from this host. Names of pods may not be known before they are ready."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(place.listen.bind, place.listen.bind)
    return join_address(here, place.ports.metrics(local))


def _devices(count: int, place: HostPlace) -> tuple[Mapping[str, str], ...]:
    """Variables of each rank; the first ``count`` GPUs that we may use, in order."""
    names = visible_devices(os.environ, count_devices())
    if count > len(names):
        field = f"{place.role.value}.device"
        problem = f"{count} ranks on this host, which has {len(names)} CUDA devices"
        raise ConfigError(field, "cuda", problem, 'more --hosts, or "cpu"')
    return tuple({"CUDA_VISIBLE_DEVICES": name} for name in names[:count])


def _network(place: HostPlace) -> dict[str, str]:
    """Collectives between hosts keep to the interface that other hosts know us by.

    By themselves the libraries take that of the host's name, which may be 127.0.1.1, or the first.
    """
    if place.num_hosts == 1 or is_loopback(place.listen.reach):
        return {}
    try:
        found = socket.getaddrinfo(place.listen.reach, None)
    except OSError as error:
        problem = f"is no address, and nobody knows the name ({error.strerror})"
        raise ConfigError("--advertise", place.listen.reach, problem, "its address") from error
    reached = {str(entry[4][0]) for entry in found}
    names = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(one.address in reached for one in addresses)
    ]
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return dict.fromkeys(variables, names[0]) if names else {}


def check_ports(place: HostPlace, num_ranks: int) -> None:
    """Refuse ports that something else listens on, before a model is loaded for nothing.

    Raises:
        ConfigError: names the port.
    """
    ports, listen = place.ports, place.listen
    wanted = [(listen.bind, ports.grpc(local)) for local in range(num_ranks)]
    wanted += [(listen.bind, ports.metrics(local)) for local in range(num_ranks)]
    wanted += [(listen.bind, ports.calls(local)) for local in range(num_ranks)]
    wanted += [(listen.reach, ports.data(local)) for local in range(num_ranks)]
    for host, port in wanted:
        try:
            with listen_at(host, port):
                pass
        except OSError as error:
            problem = f"port {port}: cannot listen on {host} ({error.strerror})"
            fix = "another --port-base, or an address of this host as --host and --advertise"
            raise ConfigError("--port-base", ports.base, problem, fix) from error
