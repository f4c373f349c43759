"""``tandem drain INSTANCE``: have an instance take nothing new, and wait until it is empty."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from typing import TYPE_CHECKING

from deploy.commands.common import (
    add_cluster_arguments,
    add_command,
    chosen_run_dir,
    run_credentials,
    running_state,
)
from deploy.errors import ClusterError

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers
    from deploy.drain import DrainOutcome

_POOL_TIMEOUT_S = 5.0
_DEADLINE_S = 30.0
_EXAMPLES = """
tandem drain decode-1
tandem drain decode-1 --deadline 60 && kill PID    # PID is its first in tandem status
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``drain``."""
    parser = add_command(
        commands,
        "drain",
        help="empty an instance of a running cluster",
        description="All ranks of INSTANCE take nothing new, and let finish what ends within the "
        "deadline; the rest goes on at other instances. The processes run on, empty, until they "
        "are told to stop; one that ends in order is started again, so that no client notices an "
        "update. Ends with 0 when nothing is left, with 1 otherwise.",
        examples=_EXAMPLES,
    )
    parser.add_argument("instance", metavar="INSTANCE", help="its name, for example decode-0")
    parser.add_argument(
        "--deadline",
        type=_seconds,
        default=_DEADLINE_S,
        metavar="S",
        help="seconds until the rest is moved; 0: at once (default: %(default)g)",
    )
    add_cluster_arguments(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Drain it, telling what is left."""
    run_dir = chosen_run_dir(arguments)
    state = running_state(run_dir)
    credentials = run_credentials(run_dir)
    from deploy.drain import drain_ranks, is_last_of_its_role, ranks_of
    from deploy.pool_watch import fetch_members

    instance, deadline_s = arguments.instance, arguments.deadline

    async def work() -> DrainOutcome:
        members = await fetch_members(
            state.control_address, state.endpoint, credentials, timeout_s=_POOL_TIMEOUT_S
        )
        if not members:
            raise ClusterError(
                f"the router at {state.control_address} names no worker. "
                "Fix: wait until the cluster is ready (`tandem status`)"
            )
        ranks = ranks_of(instance, members)
        print(f"draining {instance}, for at most {deadline_s:g} s", flush=True)
        if is_last_of_its_role(instance, members):
            role = ranks[0].role.value
            _warn(f"no other {role} instance takes requests: they wait for one, and may fail")
        return await drain_ranks(
            ranks, credentials, deadline_s=deadline_s, on_progress=_show_progress
        )

    try:
        outcome = asyncio.run(work())
    except KeyboardInterrupt:
        _warn(f"{instance} goes on draining; only a new start ends that")
        raise
    return _conclude(instance, outcome)


def _conclude(instance: str, outcome: DrainOutcome) -> int:
    for reason in outcome.lost.values():
        _warn(reason)
    for name, num_left in outcome.num_left.items():
        if num_left and name not in outcome.lost:
            _warn(f"{name} still has {_requests(num_left)}")
    if outcome.is_empty:
        print(f"{instance} is empty")
    return 0 if outcome.is_empty else 1


def _show_progress(num_left: int) -> None:
    print(f"{_requests(num_left)} left", flush=True)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time. Fix: 0 or more seconds")
    return seconds
