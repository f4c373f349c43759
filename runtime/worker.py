"""How a worker process is started: one rank of an instance, by ``python -m prefill`` or ``decode``.

The command line is the same for both roles. It is read before torch is imported, because thread
counts must be set before that.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runtime.config import ClusterConfig, DecodeSection, PrefillSection
from runtime.config_file import cluster_credentials, load_config
from runtime.endings import RankName
from runtime.errors import ConfigError
from runtime.logging import configure_logging, get_logger
from runtime.net import Credentials, Listen
from runtime.process import limit_threads
from runtime.service import Service, run_service

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """One rank's place in the cluster.

    Attributes:
        role: "prefill" or "decode".
        config: of the whole cluster.
        instance: name of the instance, for example "decode-0".
        rank: within it.
        rendezvous: "host:port" where the ranks of the instance meet; unused with one rank.
        router: gRPC "host:port" of the registry.
        listen: where this process listens, and the host that peers are told.
        credentials: of the cluster.
    """

    role: str
    config: ClusterConfig
    instance: str
    rank: int
    rendezvous: str
    router: str
    listen: Listen
    credentials: Credentials

    def __post_init__(self) -> None:
        field, count = self.section.ranks_field, self.section.num_ranks
        if not 0 <= self.rank < count:
            fix = f"a rank from 0 to {count - 1}"
            raise ConfigError("--rank", self.rank, f"{field} is {count}", fix)
        if count > 1 and not self.rendezvous:
            problem = f"the {count} ranks must meet somewhere"
            raise ConfigError("--rendezvous", "", problem, "host:port of rank 0")
        if not self.config.model.path:
            problem = "a worker needs to know its checkpoint"
            raise ConfigError("model.path", "", problem, "a folder with config.json")

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
    parser.add_argument("--router", required=True, help="host:port of the router's registry")
    parser.add_argument("--host", default="", help="interface to listen on")
    parser.add_argument("--advertise", default="", help="this host's address as peers are told")
    given = parser.parse_args(arguments)
    config = load_config(given.config)
    return WorkerOptions(
        role=role,
        config=config,
        instance=given.instance,
        rank=given.rank,
        rendezvous=given.rendezvous,
        router=given.router,
        listen=_listen_of(config, given.host, given.advertise),
        credentials=cluster_credentials(config),
    )


def _listen_of(config: ClusterConfig, host: str, advertise: str) -> Listen:
    """The command line's, else the configuration's, whose address goes with its interface only."""
    if host:
        return Listen(bind=host, advertise=advertise)
    return Listen(bind=config.cluster.host, advertise=advertise or config.cluster.advertise)


class RankService(Service, Protocol):
    """The service of one rank."""

    @property
    def is_stuck(self) -> bool:
        """After ``shutdown``: a thread hangs in a collective whose peers are gone, for ever."""
        ...


def run_worker(
    role: str,
    arguments: Sequence[str],
    make_service: Callable[[WorkerOptions], RankService],
    *,
    grace_s: Callable[[WorkerOptions], float],
) -> int:
    """Run one rank until it is told to stop; the process's exit status.

    ``make_service`` is called with the thread limits set and must import torch only then.
    """
    try:
        options = parse_worker_options(role, arguments)
    except ConfigError as error:
        configure_logging(role)
        logger.error("%s", error)
        return 2
    configure_logging(role, options.instance, options.rank)
    limit_threads(options.section.num_threads)
    try:
        service = make_service(options)
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    try:
        status = run_service(service, grace_s=grace_s(options))
    except Exception:
        # After the loss of a device even closing fails; the end is the same.
        logger.exception("the process could not end in order")
        status = 1
    if service.is_stuck:
        # No destructor may wait for the thread that never ends.
        logging.shutdown()
        os._exit(status or 1)
    return status
