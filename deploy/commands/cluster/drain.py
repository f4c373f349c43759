"""``tandem drain INSTANCE``: have an instance take nothing new, and wait until it is empty."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from deploy.commands.cluster.follow import add_operation_arguments, run_operation
from deploy.commands.common import add_cluster_arguments, add_command

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_EXAMPLES = """
tandem drain decode-1                 # half a minute for what is under way, then it moves
tandem drain decode-1 --deadline 0    # it moves at once: no client loses anything
tandem restart decode-1               # puts it back
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``drain``."""
    parser = add_command(
        commands,
        "drain",
        help="empty an instance of a running cluster",
        description="All ranks of INSTANCE take nothing new, and let finish what ends within the "
        "deadline; the rest goes on at other instances. The processes run on, empty, and are not "
        "started again when they end, until `tandem restart INSTANCE`. Ends with 0 when nothing is "
        "left, with 1 otherwise, with 3 where it was refused and nothing was changed.",
        examples=_EXAMPLES,
    )
    parser.add_argument("instance", metavar="INSTANCE", help="its name, for example decode-0")
    add_operation_arguments(parser, dry_run=False)
    add_cluster_arguments(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Have the controller do it, and tell what is left."""

    def call(stub: Any, who: str) -> Any:
        from runtime.pb import controller_pb2 as pb

        return stub.Drain(
            pb.DrainInstanceRequest(
                instance=arguments.instance, deadline_s=arguments.deadline, who=who
            )
        )

    return run_operation(arguments, call)
