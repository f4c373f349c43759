"""``tandem secret ROLE``: what a process of one role has of the cluster's secret."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.commands.common import add_command
from runtime.config import ClusterConfig
from runtime.config.file import cluster_credentials, load_config
from runtime.net.roles import Role

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_EXAMPLES = """
TANDEM_SECRET=$(openssl rand -hex 32) tandem secret prefill
tandem secret decode --config cluster.toml
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``secret``."""
    parser = add_command(
        commands,
        "secret",
        help="print what one role needs of the cluster's secret",
        description="Processes of ROLE take it as TANDEM_SECRET or cluster.secret, in the place of "
        "the cluster's: they can do all that is theirs, and act as no other role. The cluster's "
        "comes from the environment's TANDEM_SECRET, or from FILE.",
        examples=_EXAMPLES,
    )
    roles = [role.value for role in Role]
    parser.add_argument("role", choices=roles, metavar="ROLE", help=f"one of {', '.join(roles)}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="with cluster.secret")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    config = load_config(arguments.config) if arguments.config else ClusterConfig()
    print(cluster_credentials(config).of_role(Role(arguments.role)).secret)
    return 0
