"""``tandem experts simulate``: replay a trace on another cluster, before anybody rents it."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from deploy.commands.common import add_command
from deploy.commands.prepare.experts_trace import print_trace
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers
    from experts.gpu_rates import GpuRates
    from experts.simulation import Outcome

_DEFAULT_GPU = "NVIDIA H200"
_WIDTH = 150


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
tandem experts simulate prefill.npz --ranks 8 --redundant 0..64
tandem experts simulate prefill.npz --ranks 8 --redundant auto
tandem experts simulate decode.npz --ranks 8 --objective rows
tandem experts simulate prefill.npz --ranks 8 --redundant 32 --role prefill --other-ms 220 --json
""",
    )
    written = "a file that tandem experts record wrote"
    parser.add_argument("trace", type=Path, metavar="TRACE", help=written)
    numbers = (
        ("--ranks", None, "expert-parallel ranks (default: as recorded)"),
        ("--hosts", None, "that neighbouring ranks share (default: one for every 8 ranks)"),
        ("--window", None, "rows to plan from (default: the first half)"),
        ("--horizon", 2000, "passes for which moved experts are of use (default: %(default)s)"),
    )
    for flag, default, meaning in numbers:
        parser.add_argument(flag, type=int, default=default, metavar="N", help=meaning)
    parser.add_argument(
        "--redundant",
        default="0",
        metavar="N|A..B|auto",
        help="slots beyond one for each expert: a number beside none, all of a range that ranks "
        "can share, or the planner's own choice (default: 0)",
    )
    parser.add_argument(
        "--role", choices=("prefill", "decode"), help="refuse a trace of the other role"
    )
    parser.add_argument(
        "--objective",
        choices=("time", "rows"),
        default="time",
        help="what plans have to better, as rebalance_objective (default: time)",
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
    parser.add_argument("--json", action="store_true", help="one object, for programs")
    parser.set_defaults(command=run_simulate)


def run_simulate(arguments: argparse.Namespace) -> int:
    """Print what the trace would do on the cluster."""
    from experts.plan import Terms
    from experts.simulation import Cluster, simulate
    from experts.summary import describe_trace
    from experts.time_model import TimeModel
    from experts.trace import load_trace

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
    numbers = numbers_of(arguments.redundant, trace.num_experts, ranks)
    rates = rates_of(arguments.gpu)
    simulation = simulate(
        trace,
        Cluster(num_ranks=ranks, num_hosts=hosts),
        redundant=numbers,
        model=TimeModel.of_trace(trace, rates, other_s_per_pass=arguments.other_ms / 1e3),
        num_window_rows=arguments.window,
        terms=Terms(horizon_passes=arguments.horizon),
        objective=arguments.objective,
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
    if len(numbers) > 1:
        chosen = simulation.chosen
        print(
            f"chosen       {chosen.num_redundant} redundant experts by the rows planned from, "
            f"{chosen.redundant_bytes_per_rank / 1e9:.1f} GB a rank: "
            f"{chosen.expected_gain:+.1%} expected, {chosen.gain:+.1%} measured"
        )
    for line in simulation.advice.split("; "):
        print(f"advice       {line}")
    return 0


def numbers_of(text: str, num_experts: int, num_ranks: int) -> tuple[int, ...]:
    """Which numbers of redundant experts to compare, least first.

    Args:
        text: of the flag: "32" (compared with none, where ranks can share the experts without),
            "0..32" or "auto".
        num_experts: that need a slot.
        num_ranks: that share the slots evenly.

    Raises:
        ConfigError: it says something else, or no number of the range can be shared.
    """
    from experts.simulation import shared_numbers

    if num_ranks < 1:
        raise ConfigError("--ranks", num_ranks, "no ranks", "1 or more")
    if text == "auto":
        return shared_numbers(num_experts, num_ranks)
    found = re.fullmatch(r"(-?\d+)(?:\.\.(\d+))?", text)
    if found is None:
        raise ConfigError("--redundant", text, "not understood", "a number, 0..32, or auto")
    lowest = int(found[1])
    if found[2] is None:
        return tuple(sorted({lowest} | ({0} if num_experts % num_ranks == 0 else set())))
    numbers = shared_numbers(num_experts, num_ranks, max(lowest, 0), int(found[2]))
    if not numbers:
        nearest = shared_numbers(num_experts, num_ranks, max(lowest, 0))[0]
        problem = f"none of these and {num_experts} experts are dealt evenly to {num_ranks} ranks"
        raise ConfigError("--redundant", text, problem, f"{lowest}..{nearest}")
    return numbers


def rates_of(gpu: str) -> GpuRates:
    """What a GPU reaches.

    Raises:
        ConfigError: there is no data sheet of that name.
    """
    from experts.data_sheets import SHEETS
    from experts.gpu_rates import rates_of_device

    rates = rates_of_device(gpu)
    if rates is None:
        raise ConfigError("--gpu", gpu, "no data sheet of that name", " or ".join(SHEETS))
    return rates


def _table(outcomes: tuple[Outcome, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    titles = ("redundant", "GB a rank", "experts", "balancedness", "of floor", "worst layer")
    more = ("of floor", "experts' time", "expected", "gain", "moves", "GB", "steps")
    for title in titles + more:
        table.add_column(title, justify="left" if title == "experts" else "right", no_wrap=True)
    best = max(outcomes, key=lambda outcome: outcome.gain)
    for outcome in outcomes:
        now, floor, moved = outcome.balancedness, outcome.floor, outcome.moved
        planned = "left" if outcome.refusal else "planned"
        steps = (
            (f"{moved.num_moves:,}", f"{moved.num_bytes / 1e9:.1f}", f"{moved.num_rounds:,}")
            if moved
            else ("", "", "")
        )
        table.add_row(
            str(outcome.num_redundant),
            f"{outcome.redundant_bytes_per_rank / 1e9:.1f}",
            planned if outcome.is_planned else "evenly",
            f"{now.overall:.3f}",
            f"{now.overall / floor.overall:.0%}",
            f"{now.worst_layer:.3f}",
            f"{now.worst_layer / floor.worst_layer:.0%}",
            f"{outcome.seconds_per_pass * 1e3:.2f} ms",
            f"{outcome.expected_gain:+.1%}",
            f"{outcome.gain:+.1%}{' most' if outcome is best else ''}",
            *steps,
        )
    return table
