"""``tandem experts ...``: how evenly experts are loaded, and what another placement would bring."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from deploy.commands.common import add_command
from deploy.commands.prepare.experts_record import (
    add_export,
    add_live_arguments,
    add_record,
    record_live,
)
from deploy.commands.prepare.experts_simulate import add_simulate
from deploy.commands.prepare.experts_trace import print_trace

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_NUM_HOTTEST = 8


def add_parser(commands: Subparsers) -> None:
    """Declare ``experts`` and what it can do."""
    parser = add_command(
        commands,
        "experts",
        help="measure and plan the load of experts",
        description="Traces of which experts the gate chose: how even they are, and what another "
        "placement of the experts would bring.",
        examples="tandem experts show decode.npz",
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    add_record(verbs)
    add_export(verbs)
    show = add_command(
        verbs,
        "show",
        help="how even experts are loaded, and the hottest ones",
        description="Balancedness (sum of mean ranks over sum of fullest ranks) of a trace on "
        "ranks that hold its experts in order, the worst layer, both as a share of what a router "
        "without preferences would reach with this batch, and the hottest experts. Without TRACE "
        "of what running workers do just now, up to 64 passes.",
        examples="""
tandem experts show --role prefill
tandem experts show decode.npz
tandem experts show decode.npz --ranks 16 --json
""",
    )
    _add_trace_arguments(show, is_optional=True)
    add_live_arguments(show)
    show.set_defaults(command=run_show)
    add_simulate(verbs)


def _add_trace_arguments(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    parser.add_argument(
        "trace",
        type=Path,
        nargs="?" if is_optional else None,
        metavar="TRACE",
        help="a file that tandem experts record wrote",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="expert-parallel ranks (default: as recorded)"
    )
    parser.add_argument("--json", action="store_true", help="one object, for programs")


def run_show(arguments: argparse.Namespace) -> int:
    """Print how even the trace is."""
    from experts.summary import describe_trace, summarise
    from experts.trace import load_trace

    trace = load_trace(arguments.trace) if arguments.trace else record_live(arguments)
    ranks = trace.num_ranks if arguments.ranks is None else arguments.ranks
    summary = summarise(trace, num_ranks=ranks, num_hottest=_NUM_HOTTEST)
    if arguments.json:
        print(json.dumps(describe_trace(trace) | summary.describe(), indent=1))
        return 0
    print_trace(trace)
    print(f"on {ranks} ranks, experts in order")
    floor = summary.floor
    print(f"balancedness {_of_floor(summary.now.overall, floor.overall)}")
    worst = _of_floor(summary.now.worst_layer, floor.worst_layer)
    print(f"worst layer  {worst}: layer {summary.now.worst_layer_index}")
    print()
    table = Table(box=None, pad_edge=False)
    for title in ("layer", "expert", "tokens", "times the mean"):
        table.add_column(title, justify="right")
    for hot in summary.hottest:
        cells = (str(hot.layer), str(hot.expert), f"{hot.tokens:,}", f"{hot.times_mean:.1f}")
        table.add_row(*cells)
    Console().print(table, crop=False)
    return 0


def _of_floor(value: float, floor: float) -> str:
    return f"{value:.3f} ({value / floor:.0%} of the noise floor, {floor:.3f})"
