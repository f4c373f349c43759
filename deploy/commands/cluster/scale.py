"""``tandem scale ROLE N``: more or fewer instances of a role, without disturbing the others."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from deploy.commands.cluster.follow import add_operation_arguments, run_operation
from deploy.commands.common import add_cluster_arguments, add_command

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_EXAMPLES = """
tandem scale decode 3              # as many as it takes to have three
tandem scale prefill +1            # one more
tandem scale decode -1 --dry-run   # who would go, and what would be left
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``scale``."""
    parser = add_command(
        commands,
        "scale",
        help="have more or fewer instances of a role",
        description="New instances take free names, ports and GPUs, and join when they serve. "
        "Those that go, the newest first, take nothing new, let finish what ends within the "
        "deadline, and end; the rest goes on at other instances. Ends with 0 when it is done, with "
        "1 when a new instance failed, with 3 where it was refused and nothing was changed.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "role", choices=("prefill", "decode"), metavar="ROLE", help="prefill, decode"
    )
    parser.add_argument(
        "count", type=_count, metavar="N", help="how many; or how many more (+1) or fewer (-1)"
    )
    add_operation_arguments(parser)
    add_cluster_arguments(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Have the controller do it, and follow."""
    count, relative = arguments.count

    def call(stub: Any, who: str) -> Any:
        from runtime.pb import controller_pb2 as pb

        return stub.Scale(
            pb.ScaleRequest(
                role=arguments.role,
                count=count,
                relative=relative,
                deadline_s=arguments.deadline,
                dry_run=arguments.dry_run,
                who=who,
            )
        )

    return run_operation(arguments, call)


def _count(text: str) -> tuple[int, bool]:
    if not re.fullmatch(r"[+-]?\d{1,6}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number. Fix: 3, +1 or -1")
    return int(text), text[0] in "+-"
