"""How one decode process was started: its command line and the settings that follow from it.

Known before torch is imported, because thread counts must be set before that.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.config import ClusterConfig
from runtime.config_file import cluster_secret, load_config
from runtime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """One rank's place in the cluster.

    Attributes:
        config: of the whole cluster.
        instance: name of the decode instance, for example "decode-0".
        rank: data-parallel rank within it.
        rendezvous: "host:port" where the ranks of the instance meet; unused with one rank.
        router: gRPC "host:port" of the registry.
        host: interface on which this process listens.
        secret: of the cluster.
    """

    config: ClusterConfig
    instance: str
    rank: int
    rendezvous: str
    router: str
    host: str
    secret: str

    def __post_init__(self) -> None:
        dp = self.config.decode.dp
        if not 0 <= self.rank < dp:
            raise ConfigError(
                "--rank", self.rank, f"decode.dp is {dp}", f"a rank from 0 to {dp - 1}"
            )
        if dp > 1 and not self.rendezvous:
            raise ConfigError(
                "--rendezvous", "", f"the {dp} ranks must meet somewhere", "host:port of rank 0"
            )
        if not self.config.model.path:
            raise ConfigError(
                "model.path", "", "a worker needs to know its checkpoint", "the checkpoint's folder"
            )

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        return self.config.model.name or Path(self.config.model.path).name


def parse_options(arguments: Sequence[str]) -> WorkerOptions:
    """Read the command line and the configuration that it names.

    Raises:
        ConfigError: a value that cannot work.
    """
    parser = argparse.ArgumentParser(
        prog="python -m decode", description="One rank of a decode worker."
    )
    parser.add_argument("--config", type=Path, required=True, help="TOML file of the cluster")
    parser.add_argument("--instance", required=True, help="name of this decode instance")
    parser.add_argument("--rank", type=int, default=0, help="data-parallel rank in the instance")
    parser.add_argument("--rendezvous", default="", help="host:port where its ranks meet")
    parser.add_argument("--router", required=True, help="host:port of the router's registry")
    parser.add_argument("--host", default="", help="interface to listen on")
    given = parser.parse_args(arguments)
    config = load_config(given.config)
    return WorkerOptions(
        config=config,
        instance=given.instance,
        rank=given.rank,
        rendezvous=given.rendezvous,
        router=given.router,
        host=given.host or config.cluster.host,
        secret=cluster_secret(config),
    )
