"""``tandem apply CONFIG``: make the cluster that runs like a configuration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.commands.cluster.follow import add_operation_arguments, run_operation
from deploy.commands.common import add_command
from runtime.config.file import dump_config, load_config

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_EXAMPLES = """
tandem apply cluster.toml --dry-run   # what differs, and what each difference takes
tandem apply cluster.toml             # show it, then do it
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``apply``."""
    parser = add_command(
        commands,
        "apply",
        help="make the running cluster like a configuration",
        description="Shows what differs, field by field; then starts and stops instances, and "
        "restarts those whose settings changed, one after the other. What cannot change while the "
        "cluster runs is refused with its field and the fix, and nothing is changed.",
        examples=_EXAMPLES,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the TOML file")
    parser.add_argument("--name", default="", help="cluster.name, where the file has another")
    parser.add_argument(
        "--allow-gap", action="store_true", help="though nobody of a role serves meanwhile"
    )
    add_operation_arguments(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Have the controller do it, and follow."""
    text = dump_config(load_config(arguments.config))

    def call(stub: Any, who: str) -> Any:
        from runtime.pb import controller_pb2 as pb

        return stub.Apply(
            pb.ApplyRequest(
                config=text,
                allow_gap=arguments.allow_gap,
                deadline_s=arguments.deadline,
                dry_run=arguments.dry_run,
                who=who,
            )
        )

    return run_operation(arguments, call)
