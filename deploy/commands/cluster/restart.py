"""``tandem restart``: start workers anew, one after the other, so that no client notices."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from deploy.commands.cluster.follow import add_operation_arguments, run_operation
from deploy.commands.common import add_cluster_arguments, add_command

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_EXAMPLES = """
tandem restart --rolling           # all workers, one after the other
tandem restart --rolling decode    # those of one role
tandem restart decode-1            # one; also one that was drained, or that hangs
tandem restart router --allow-gap  # nobody else takes its requests meanwhile
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``restart``."""
    parser = add_command(
        commands,
        "restart",
        help="start workers anew, with new code",
        description="Where there is room, a replacement serves before an instance is drained, and "
        "has a name of its own; else the instance is drained and starts again under its name while "
        "others of its role serve. Ends with 0 when it is done, with 1 when one did not come back, "
        "with 3 where it was refused and nothing was changed.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "target",
        nargs="?",
        default="",
        metavar="ROLE|INSTANCE",
        help="prefill, decode, router, or one instance (default: all workers)",
    )
    parser.add_argument(
        "--rolling", action="store_true", help="one after the other; else all at once"
    )
    parser.add_argument(
        "--allow-gap", action="store_true", help="though nobody of the role serves meanwhile"
    )
    add_operation_arguments(parser)
    add_cluster_arguments(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Have the controller do it, and follow."""

    def call(stub: Any, who: str) -> Any:
        from runtime.pb import controller_pb2 as pb

        return stub.Restart(
            pb.RestartRequest(
                target=arguments.target,
                rolling=arguments.rolling,
                allow_gap=arguments.allow_gap,
                deadline_s=arguments.deadline,
                dry_run=arguments.dry_run,
                who=who,
            )
        )

    return run_operation(arguments, call)
