"""``tandem down``: stop a cluster that runs on this machine, and see that nothing of it is left."""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import TYPE_CHECKING

from deploy.commands.common import add_cluster_arguments, add_command, chosen_run_dir
from deploy.errors import ClusterError
from deploy.running.former_run import end_former_run
from deploy.running.sweep import find_processes, wait_until_gone

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_BETWEEN_SIGNALS_S = 0.2
"""Two of a kind that come at once are one."""
_ORDERLY_S = 70.0
"""Longer than the controller waits for router and workers."""


def add_parser(commands: Subparsers) -> None:
    """Declare ``down``."""
    parser = add_command(
        commands,
        "down",
        help="stop a running cluster",
        description="Let requests finish, stop every process, and see that nothing is left.",
        examples="""
tandem down
tandem down --name staging --now    # one of several, without waiting for its requests
""",
    )
    add_cluster_arguments(parser)
    parser.add_argument("--now", action="store_true", help="do not let requests finish")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Stop it in order, then kill what is left."""
    run_dir = chosen_run_dir(arguments)
    state = run_dir.read_state()
    if state is None:
        raise ClusterError(f"cluster {run_dir.path.name!r} is not running")
    if run_dir.is_owned():
        # Not SIGTERM, which a controller may leave its cluster running for.
        os.kill(state.pid, signal.SIGINT)
        if arguments.now:
            time.sleep(_BETWEEN_SIGNALS_S)
            os.kill(state.pid, signal.SIGINT)
        if not wait_until_gone(state.pid, _ORDERLY_S):
            os.kill(state.pid, signal.SIGKILL)
            wait_until_gone(state.pid, _ORDERLY_S)
    end_former_run(run_dir)
    if left := find_processes(state.run_id):
        pids = ", ".join(str(process.pid) for process in left)
        raise ClusterError(f"these processes cannot be ended: {pids}")
    print(f"stopped {state.name}")
    return 0
