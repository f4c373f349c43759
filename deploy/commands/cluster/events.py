"""``tandem events``: what happened to a cluster, and who asked for it; also of one that is gone."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from deploy.commands.common import (
    add_cluster_arguments,
    add_command,
    chosen_run_dir,
    run_credentials,
)
from deploy.control.events import read_events
from deploy.errors import ClusterError

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers
    from deploy.state import RunDir

_MOST = 50
_EXAMPLES = """
tandem events                       # the newest of them
tandem events -f                    # and those that come
tandem events --last 1000 --json    # one JSON object a line
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``events``."""
    parser = add_command(
        commands,
        "events",
        help="show who changed what, and what happened",
        description="Operations with who asked for them, deaths, restarts, and workers that join, "
        "drain and leave. The record outlives the cluster: events.jsonl in its run directory.",
        examples=_EXAMPLES,
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what comes")
    parser.add_argument(
        "--last", type=int, default=_MOST, metavar="N", help="how many (default: %(default)d)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    add_cluster_arguments(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print them; with ``--follow`` until the cluster ends."""
    run_dir = chosen_run_dir(arguments)
    state = run_dir.read_state()
    if state is not None and state.controller_address and run_dir.is_owned():
        from deploy.control.client import follow
        from runtime.pb import controller_pb2 as pb

        request = pb.EventsRequest(follow=arguments.follow, most=max(0, arguments.last))

        def call(stub: Any) -> Any:
            return stub.Events(request)

        def take(event: Any) -> None:
            values = {name: getattr(event, name) for name in event.DESCRIPTOR.fields_by_name}
            _show(values, as_json=arguments.json)

        follow(state, run_credentials(run_dir), call, take)
        return 0
    if arguments.follow:
        raise ClusterError(
            f"cluster {run_dir.path.name!r} does not serve, so there is nothing to follow. "
            "Fix: without --follow"
        )
    _show_file(run_dir, arguments)
    return 0


def _show_file(run_dir: RunDir, arguments: argparse.Namespace) -> None:
    for event in read_events(run_dir.events_path)[-max(0, arguments.last) :]:
        _show(json.loads(event.to_json()), as_json=arguments.json)


def _show(event: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(event), flush=True)
        return
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
    where = f" from {event['source']}" if event["source"] else ""
    by = f"  by {event['who']}{where}" if event["who"] else ""
    print(f"{stamp}  {event['kind']:<10} {event['instance']:<12} {event['text']}{by}", flush=True)
