"""``tandem experts simulate``: replay a trace on another cluster, before anybody rents it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from deploy.commands.common import add_command
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers
    from engine.experts.gpu_rates import GpuRates
    from engine.experts.simulation import Outcome

_DEFAULT_GPU = "NVIDIA H200"
_WIDTH = 120


def add_simulate(verbs: Subparsers) -> None:
    """Declare ``simulate``."""
    parser = add_command(
        verbs,
        "simulate",
        help="what another placement, redundant experts or more ranks would bring",
        description="Replays a trace on a cluster of another size: plans from its first rows, "
        "measures the others, with and without redundant experts, and says what pays. Gains are "
        "modelled time (active experts, rows, travel), of the experts' part of a pass unless "
        "--other-ms says what else a pass takes.",
        examples="""
tandem experts simulate prefill.npz --ranks 8
tandem experts simulate decode.npz --ranks 72 --redundant 32 --hosts 9
tandem experts simulate prefill.npz --ranks 8 --redundant 32 --role prefill --other-ms 220 --json
""",
    )
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="a file that tandem experts record wrote"
    )
    numbers = (
        ("--ranks", "N", "expert-parallel ranks (default: as recorded)"),
        ("--hosts", "N", "that neighbouring ranks share (default: one for every 8 ranks)"),
        ("--window", "N", "rows to plan from (default: the first half)"),
    )
    for flag, metavar, meaning in numbers:
        parser.add_argument(flag, type=int, metavar=metavar, help=meaning)
    parser.add_argument(
        "--redundant",
        type=int,
        default=0,
        metavar="N",
        help="slots beyond one for each expert (default: 0)",
    )
    parser.add_argument(
        "--role", choices=("prefill", "decode"), help="refuse a trace of the other role"
    )
    parser.add_argument(
        "--gpu",
        default=_DEFAULT_GPU,
        metavar="NAME",
        help="whose data sheet times are modelled by (default: %(default)s)",
    )
    parser.add_argument(
        "--other-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="of a pass outside experts (default: 0: gains of the experts' part alone)",
    )
    parser.add_argument(
        "--horizon",
        type=int,
        default=2000,
        metavar="PASSES",
        help="for how long moved experts are of use (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="one object, for programs")
    parser.set_defaults(command=run_simulate)


def run_simulate(arguments: argparse.Namespace) -> int:
    """Print what the trace would do on the cluster."""
    from deploy.commands.experts import describe_trace, print_trace
    from engine.experts.plan import Terms
    from engine.experts.simulation import Cluster, simulate
    from engine.experts.time_model import TimeModel
    from engine.experts.trace import load_trace

    trace = load_trace(arguments.trace)
    if arguments.role not in (None, trace.role):
        problem = f"{arguments.trace} was recorded of {trace.role}, and roles are skewed unlike"
        raise ConfigError("--role", arguments.role, problem, f"{trace.role}, or another trace")
    if arguments.other_ms < 0:
        raise ConfigError("--other-ms", arguments.other_ms, "less than no time", "0 or more")
    if arguments.horizon < 1:
        raise ConfigError("--horizon", arguments.horizon, "no passes", "1 or more")
    ranks = trace.num_ranks if arguments.ranks is None else arguments.ranks
    hosts = max(-(-ranks // 8), 1) if arguments.hosts is None else arguments.hosts
    cluster = Cluster(num_ranks=ranks, num_redundant=arguments.redundant, num_hosts=hosts)
    rates = rates_of(arguments.gpu)
    simulation = simulate(
        trace,
        cluster,
        model=TimeModel.of_trace(trace, rates, other_s_per_pass=arguments.other_ms / 1e3),
        num_window_rows=arguments.window,
        terms=Terms(horizon_passes=arguments.horizon),
    )
    if arguments.json:
        replayed = {"ranks": ranks, "hosts": hosts, "gpu": rates.name}
        print(json.dumps(describe_trace(trace) | replayed | simulation.describe(), indent=1))
        return 0
    print_trace(trace)
    rows = (
        f"{simulation.num_window_rows} rows planned from, {simulation.num_measured_rows} measured"
    )
    print(f"replayed     on {ranks} ranks of {hosts} hosts, {rates.name}; {rows}")
    print()
    # Whole in a file and a pipe too, where there is no width to keep to.
    Console(width=_WIDTH).print(_table(simulation.outcomes), crop=False)
    print()
    if arguments.redundant:
        gigabytes = simulation.redundant_bytes_per_rank / 1e9
        print(f"memory       {gigabytes:.1f} GB a rank for {arguments.redundant} redundant experts")
    for line in simulation.advice.split("; "):
        print(f"advice       {line}")
    return 0


def rates_of(gpu: str) -> GpuRates:
    """What a GPU reaches.

    Raises:
        ConfigError: there is no data sheet of that name.
    """
    from engine.data_sheets import SHEETS
    from engine.experts.gpu_rates import rates_of_device

    rates = rates_of_device(gpu)
    if rates is None:
        raise ConfigError("--gpu", gpu, "no data sheet of that name", " or ".join(SHEETS))
    return rates


def _table(outcomes: tuple[Outcome, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    titles = ("redundant", "experts", "balancedness", "of floor", "worst layer", "of floor")
    for title in (*titles, "experts' time", "gain", "moves", "GB", "steps"):
        table.add_column(title, justify="left" if title == "experts" else "right", no_wrap=True)
    for outcome in outcomes:
        now, floor = outcome.balancedness, outcome.floor
        moved = (
            f"{outcome.num_moves:,}",
            f"{outcome.num_bytes / 1e9:.1f}",
            f"{outcome.num_rounds:,}",
        )
        planned = "left" if outcome.refusal else "planned"
        table.add_row(
            str(outcome.num_redundant),
            planned if outcome.is_planned else "evenly",
            f"{now.overall:.3f}",
            f"{now.overall / floor.overall:.0%}",
            f"{now.worst_layer:.3f}",
            f"{now.worst_layer / floor.worst_layer:.0%}",
            f"{outcome.seconds_per_pass * 1e3:.2f} ms",
            f"{outcome.gain:+.1%}",
            *(moved if outcome.is_planned else ("", "", "")),
        )
    return table
