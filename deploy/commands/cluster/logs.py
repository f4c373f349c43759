"""``tandem logs [NAME]``: the logs of a cluster's processes, also after its end."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.commands.common import (
    add_cluster_arguments,
    add_command,
    chosen_run_dir,
    run_credentials,
)
from deploy.errors import ClusterError
from deploy.state import RunDir, default_run_root
from deploy.views.log_reader import (
    CONTROLLER,
    LocalLogs,
    LogSource,
    SeveralLogs,
    chosen_names,
    follow,
    merged_tail,
)

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_NUM_LINES = 50
_POLL_S = 0.25
_EXAMPLES = """
tandem logs                       # the end of all logs, in the order of their times
tandem logs decode-0 -f           # all ranks of an instance, as they go on
tandem logs prefill --lines 200   # a whole role
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``logs``."""
    parser = add_command(
        commands,
        "logs",
        help="show what the processes of a cluster say",
        description="The last lines of one log or several, merged by their times. Where no cluster "
        "runs, those of the last one: they say why it ended.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "process",
        nargs="?",
        default="",
        metavar="NAME",
        help="router, decode-0/1, decode-0, decode, controller (default: all)",
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on as lines are added")
    parser.add_argument(
        "-n",
        "--lines",
        type=_count,
        default=_NUM_LINES,
        metavar="N",
        help="how many of the last lines (default: %(default)d)",
    )
    add_cluster_arguments(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print lines until there are no more; with ``--follow`` until the cluster has ended."""
    run_dir = _run_dir_of(arguments)
    with contextlib.closing(log_source(run_dir)) as source:
        names = chosen_names(arguments.process, source.names())
        lines, positions = merged_tail(source, names, arguments.lines)
        for line in lines:
            print(line)
        if arguments.follow:
            for line in follow(source, positions, poll_s=_POLL_S, goes_on=run_dir.is_owned):
                print(line, flush=True)
    return 0


def log_source(run_dir: RunDir) -> LogSource:
    """Where the logs of the cluster of ``run_dir`` are."""
    state = run_dir.read_state()
    logged = [] if state is None else [one for one in state.processes if one.log_path]
    elsewhere = [one.name for one in logged if state is not None and not state.is_here(one)]
    named = {CONTROLLER: run_dir.controller_log_path}
    named |= {one.name: Path(one.log_path) for one in logged if one.name not in elsewhere}
    # A cluster that has ended has logs and no state.
    others = sorted(set(run_dir.log_dir.glob("*.log")) - set(named.values()))
    local = LocalLogs({**named, **{path.stem: path for path in others}})
    if state is None or not elsewhere:
        return local
    from deploy.control.remote_logs import RemoteLogs

    return SeveralLogs(RemoteLogs(state, run_credentials(run_dir), elsewhere), local)


def _run_dir_of(arguments: argparse.Namespace) -> RunDir:
    try:
        run_dir = chosen_run_dir(arguments)
    except ClusterError:
        last = _last_run()
        if last is None or arguments.name or arguments.config:
            raise
        run_dir = last
    if not run_dir.log_dir.is_dir():
        raise ClusterError(f"cluster {run_dir.path.name!r} has no logs at {run_dir.log_dir}")
    return run_dir


def _last_run() -> RunDir | None:
    """The run directory in the default root that was written last."""
    logs = default_run_root().glob("*/logs/controller.log")
    last = max(logs, key=lambda path: path.stat().st_mtime, default=None)
    return None if last is None else RunDir(last.parents[1])


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of lines. Fix: 0 or more")
    return int(text)
