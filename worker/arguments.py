"""The command line of a worker process, one rank of an instance: the same for both roles."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.config import ClusterConfig, DecodeSection, PrefillSection
from runtime.config.file import cluster_credentials, load_config, on_this_host
from runtime.errors import ConfigError
from runtime.net.credentials import Credentials, Listen
from runtime.net.roles import Role
from runtime.net.router_names import PREFIX, parse_routers
from worker.endings import RankName

GRACE_S = 30.0
"""How long a rank that is told to stop may take to finish what it has, if nobody says otherwise."""
ROUTER_HELP = (
    f"host:port of a registry, or several: a,b; {PREFIX}host:port: all that host resolves to"
)
_PORTS = {
    "port": "gRPC",
    "metrics-port": "/metrics, /health",
    "data-port": "KV",
    "calls-port": "routers' short calls",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """One rank's place in the cluster.

    Attributes:
        role: "prefill" or "decode".
        config: of the whole cluster.
        instance: name of the instance, for example "decode-0".
        rank: within it.
        rendezvous: "host:port" where the ranks of the instance meet; unused with one rank.
        router: where the registries are, as in `runtime.net.router_names`.
        listen: where this process listens for calls, and the host that peers are told.
        metrics_port: of `/metrics` and `/health`; 0: any free one.
        data_port: of KV; 0: any free one. NIXL and Mooncake open further ones of their choice.
        calls_port: of routers' short calls; 0: any free one.
        credentials: of the cluster.
        grace_s: how long it may drain when it is told to stop.
    """

    role: str
    config: ClusterConfig
    instance: str
    rank: int
    rendezvous: str
    router: str
    listen: Listen
    credentials: Credentials
    metrics_port: int = 0
    data_port: int = 0
    calls_port: int = 0
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        field, count = self.section.ranks_field, self.section.num_ranks
        if not 0 <= self.rank < count:
            fix = f"a rank from 0 to {count - 1}"
            raise ConfigError("--rank", self.rank, f"{field} is {count}", fix)
        if count > 1 and not self.rendezvous:
            problem = f"the {count} ranks must meet somewhere"
            raise ConfigError("--rendezvous", "", problem, "host:port of rank 0")
        if not 0 <= self.grace_s < float("inf"):
            raise ConfigError(
                "--grace", self.grace_s, "a rank must end some day", "0 or more seconds"
            )
        self._check_ports()
        if not self.config.model.path:
            problem = "a worker needs to know its checkpoint"
            raise ConfigError("model.path", "", problem, "a folder with config.json")

    def _check_ports(self) -> None:
        flags = ("--port", "--metrics-port", "--data-port", "--calls-port")
        ports = (self.listen.port, self.metrics_port, self.data_port, self.calls_port)
        for flag, port in zip(flags, ports, strict=True):
            if not 0 <= port < 2**16:
                fix = "1 to 65535, or 0: any free one"
                raise ConfigError(flag, port, "is no port", fix)
            if port and ports.count(port) > 1:
                raise ConfigError(flag, port, "is another one's, too", "four different ports")

    @property
    def section(self) -> PrefillSection | DecodeSection:
        """The configuration of this role."""
        return self.config.prefill if self.role == "prefill" else self.config.decode

    @property
    def rank_name(self) -> RankName:
        """How this rank speaks of itself."""
        return RankName(instance=self.instance, rank=self.rank, num_ranks=self.section.num_ranks)

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        return self.config.model.name or Path(self.config.model.path).name


def parse_worker_options(role: str, arguments: Sequence[str]) -> WorkerOptions:
    """Read the command line and the configuration that it names.

    Raises:
        ConfigError: a value that cannot work.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {role}", description=f"One rank of a {role} worker."
    )
    parser.add_argument("--config", type=Path, required=True, help="TOML file of the cluster")
    parser.add_argument("--instance", required=True, help=f'its name, for example "{role}-0"')
    parser.add_argument("--rank", type=int, default=0, help="rank within the instance")
    parser.add_argument("--rendezvous", default="", help="host:port where its ranks meet")
    parser.add_argument("--router", required=True, help=ROUTER_HELP)
    parser.add_argument("--host", default="", help="interface to listen on")
    parser.add_argument("--advertise", default="", help="this host's address as peers are told")
    for name, use in _PORTS.items():
        parser.add_argument(f"--{name}", type=int, default=0, help=f"of {use}; 0: any free one")
    parser.add_argument("--grace", type=float, default=GRACE_S, help="seconds to drain")
    given = parser.parse_args(arguments)
    try:
        parse_routers(given.router)
    except ValueError as error:
        raise ConfigError("--router", given.router, str(error), ROUTER_HELP) from error
    config = load_config(given.config)
    config = config if given.host else on_this_host(config)
    return WorkerOptions(
        role=role,
        config=config,
        instance=given.instance,
        rank=given.rank,
        rendezvous=given.rendezvous,
        router=given.router,
        listen=replace(_listen_of(config, given.host, given.advertise), port=given.port),
        credentials=cluster_credentials(config, Role(role)),
        metrics_port=given.metrics_port,
        data_port=given.data_port,
        calls_port=given.calls_port,
        grace_s=given.grace,
    )


def _listen_of(config: ClusterConfig, host: str, advertise: str) -> Listen:
    """The command line's, else the configuration's, whose address goes with its interface only."""
    if host:
        return Listen(bind=host, advertise=advertise)
    return Listen(bind=config.cluster.host, advertise=advertise or config.cluster.advertise)
