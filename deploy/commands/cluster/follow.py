"""Shows an operation of the controller: its plan, its steps as they come, its end."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deploy.commands.common import chosen_run_dir, run_credentials, running_state
from deploy.errors import ClusterError

if TYPE_CHECKING:
    from runtime.pb import controller_pb2 as pb

DEADLINE_S = 30.0
"""How long requests of what is stopped may go on there by themselves."""


def add_operation_arguments(parser: argparse.ArgumentParser, *, dry_run: bool = True) -> None:
    """``--deadline``, ``--dry-run``, ``--json``."""
    parser.add_argument(
        "--deadline",
        type=seconds,
        default=DEADLINE_S,
        metavar="S",
        help="seconds until requests of what is drained move on; 0: at once (default: %(default)g)",
    )
    if dry_run:
        parser.add_argument(
            "--dry-run", action="store_true", help="show what would be done, and do nothing"
        )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run_operation(arguments: argparse.Namespace, make_call: Callable[[Any, str], Any]) -> int:
    """Have the controller carry out what ``make_call`` (stub, who) asks; 0 when it was done.

    Raises:
        ClusterError: no cluster runs, or it refuses.
    """
    run_dir = chosen_run_dir(arguments)
    state = running_state(run_dir)
    credentials = run_credentials(run_dir)
    from deploy.control.client import follow
    from deploy.control.events import who

    shown = _Shown(as_json=arguments.json)
    try:
        follow(state, credentials, lambda stub: make_call(stub, who()), shown.take)
    except KeyboardInterrupt:
        if shown.is_under_way:
            _warn("it goes on without this command; `tandem events -f` follows it")
        raise
    if shown.is_under_way and not getattr(arguments, "dry_run", False):
        raise ClusterError("the controller ended before the operation did: `tandem events`")
    return 1 if shown.failed else 0


class _Shown:
    """Takes updates; what went wrong goes to standard error."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._began = 0.0
        self.is_under_way = False
        self.failed = False

    def take(self, update: pb.OperationUpdate) -> None:
        """Show one update."""
        kind = update.WhichOneof("news")
        self.is_under_way = kind != "outcome"
        self.failed = kind == "outcome" and not update.outcome.ok
        if self._as_json:
            _print_json(update)
        elif kind == "plan":
            self._began = update.time
            show_plan(update.plan)
        elif kind == "step":
            self._show_step(update)
        elif self.failed:
            print(f"error: {update.outcome.message}", file=sys.stderr)
        else:
            print(f"done in {update.outcome.seconds:.1f} s: {update.outcome.message}", flush=True)

    def _show_step(self, update: pb.OperationUpdate) -> None:
        text = update.step.text
        if text.startswith("warning: "):
            print(text, file=sys.stderr, flush=True)
        else:
            print(f"[{update.time - self._began:5.1f} s] {text}", flush=True)


def show_plan(plan: pb.OperationPlan) -> None:
    """Lines of what will be done."""
    print(plan.what)
    for change in plan.changes:
        print(f"  {change.field}: {change.old} -> {change.new}   ({change.effect})")
    for title, names in (("start", plan.start), ("restart", plan.restart), ("stop", plan.stop)):
        if names:
            print(f"  {title + ':':<9}{', '.join(names)}")
    for size in plan.sizes:
        if size.instances != size.instances_now:
            print(f"  {size.role + ':':<9}{size.instances_now} -> {size.instances} instances")
    if plan.num_devices or plan.num_devices_now:
        print(f"  GPUs:    {plan.num_devices_now} -> {plan.num_devices}")
    for note in plan.notes:
        print(f"  {note}", flush=True)


def seconds(text: str) -> float:
    """An argument that is a time.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time. Fix: 0 or more seconds")
    return value


def _print_json(update: pb.OperationUpdate) -> None:
    from google.protobuf.json_format import MessageToDict

    values = MessageToDict(
        update, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    print(json.dumps(values), flush=True)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
