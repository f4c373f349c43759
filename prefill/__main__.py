"""`python -m prefill`: one rank of a prefill worker."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Protocol

from runtime.config_file import cluster_secret, load_config
from runtime.errors import ConfigError
from runtime.logging import configure_logging, get_logger
from runtime.process import limit_threads
from runtime.service import Service, run_service

GRACE_S = 10.0
FOLLOWER_EXTRA_GRACE_S = 5.0

logger = get_logger(__name__)


class RankService(Service, Protocol):
    """A service of one rank."""

    is_stuck: bool
    """After `shutdown`: a thread of it will never end."""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m prefill", description=__doc__)
    parser.add_argument("--config", type=Path, help="the cluster's TOML file; default: built in")
    parser.add_argument("--instance", required=True, help='name of the worker, as "prefill-0"')
    parser.add_argument("--rank", type=int, default=0, help="in the tensor-parallel group")
    parser.add_argument("--rendezvous", default="", help="HOST:PORT where the ranks meet")
    parser.add_argument("--router", required=True, help="HOST:PORT of the router's control process")
    parser.add_argument("--host", default="", help="interface to serve on; default: cluster.host")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run until told to stop; the exit status."""
    arguments = make_parser().parse_args(argv)
    configure_logging("prefill", arguments.instance, arguments.rank)
    try:
        service = make_service(arguments)
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    # Followers end when rank 0 says so, which is after it has drained.
    extra_s = FOLLOWER_EXTRA_GRACE_S if arguments.rank else 0.0
    status = run_service(service, grace_s=GRACE_S + extra_s)
    if service.is_stuck:
        # A thread hangs in a collective whose peers are gone: no destructor may wait for it.
        logging.shutdown()
        os._exit(status or 1)
    return status


def make_service(arguments: argparse.Namespace) -> RankService:
    """The service of this rank.

    Raises:
        ConfigError: the file, or a rank or a rendezvous that does not fit it.
    """
    config = load_config(arguments.config)
    if not 0 <= arguments.rank < config.prefill.tp:
        raise ConfigError(
            "--rank", arguments.rank, f"prefill.tp is {config.prefill.tp}", "a rank below it"
        )
    if config.prefill.tp > 1 and not arguments.rendezvous:
        raise ConfigError("--rendezvous", "", "several ranks must meet", "the HOST:PORT of rank 0")
    limit_threads(config.prefill.num_threads)
    # Only now: numeric libraries read the thread limits when they are imported.
    from prefill.assembly import WorkerOptions
    from prefill.worker import FollowerWorker, LeaderWorker

    options = WorkerOptions(
        config=config,
        instance=arguments.instance,
        rank=arguments.rank,
        rendezvous=arguments.rendezvous,
        router=arguments.router,
        host=arguments.host or config.cluster.host,
        secret=cluster_secret(config),
    )
    return FollowerWorker(options) if arguments.rank else LeaderWorker(options)


if __name__ == "__main__":
    sys.exit(main())
