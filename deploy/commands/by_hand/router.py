"""``tandem router``: one router on this host, without Ray."""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.config.file import cluster_credentials, dump_config, load_config, secret_variables
from runtime.errors import ConfigError
from runtime.net.roles import Role

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers
    from runtime.config import ClusterConfig

_GRACE_S = 30.0
_EXAMPLE = """\
example; the secret comes from the environment's TANDEM_SECRET, or from FILE:
  tandem router --config FILE --host 0.0.0.0 --advertise 10.0.0.1

HTTP is on router.port, the registry that workers join on router.control_port; neither may be 0.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``router``."""
    parser = commands.add_parser(
        "router",
        help="run a router on this host, without Ray",
        description="Stays until it is told to stop: SIGTERM drains, a second one ends at once. "
        "Workers are started by `tandem worker`.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="a TOML file")
    parser.add_argument("--host", default="", help="listen here (cluster.host)")
    parser.add_argument("--advertise", default="", metavar="HOST", help="as others are told")
    parser.add_argument(
        *("--grace",), type=float, default=_GRACE_S, metavar="S", help="to drain (%(default)g s)"
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Be the router until told to stop."""
    config = _resolve(arguments)
    # The file that the router reads has no secret in it.
    os.environ.update(secret_variables(cluster_credentials(config, Role.ROUTER)))
    from router.__main__ import main

    with tempfile.TemporaryDirectory(prefix="tandem-router-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(dump_config(config), encoding="utf-8")
        return main(["--config", str(path), "--grace", f"{arguments.grace:g}"])


def _resolve(arguments: argparse.Namespace) -> ClusterConfig:
    from deploy.checkpoint.model_folder import with_model

    config = with_model(load_config(arguments.config))
    for field in ("port", "control_port"):
        if not getattr(config.router, field):
            problem = "nobody would know where it is"
            raise ConfigError(f"router.{field}", 0, problem, "a port of your choice")
    if not arguments.host and not arguments.advertise:
        return config
    cluster = dataclasses.replace(
        config.cluster,
        host=arguments.host or config.cluster.host,
        advertise=arguments.advertise or ("" if arguments.host else config.cluster.advertise),
    )
    return dataclasses.replace(config, cluster=cluster)
